# SPDX-License-Identifier: Apache-2.0
"""The indexer: its queries, the logits of compressed keys, the chosen indices."""
