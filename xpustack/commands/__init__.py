# SPDX-License-Identifier: Apache-2.0
"""The commands, one module for those about one thing; `xpustack.cli` registers them."""
