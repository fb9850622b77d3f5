# SPDX-License-Identifier: Apache-2.0
"""An ordered patch stack on pinned vLLM releases, and the tool that proves it."""
