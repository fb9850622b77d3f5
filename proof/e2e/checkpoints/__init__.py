# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, as they are published and as nobody should serve them."""
