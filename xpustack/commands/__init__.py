# SPDX-License-Identifier: Apache-2.0
"""The commands, each in its own module; `xpustack.cli` registers them."""
