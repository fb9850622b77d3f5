# SPDX-License-Identifier: Apache-2.0
"""The commands, one module for those about one thing; `__main__` registers them."""
