# SPDX-License-Identifier: Apache-2.0
"""One command a module; `xpustack.cli` registers them."""
