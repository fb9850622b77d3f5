# SPDX-License-Identifier: Apache-2.0
"""Commands of their own modules; `xpustack.cli` registers them."""
