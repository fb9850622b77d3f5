# SPDX-License-Identifier: Apache-2.0
"""What the KV cache is written by and gathered with."""
