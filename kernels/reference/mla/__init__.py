# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention: decode, prefill, and the inverse rotation of their output."""
