# SPDX-License-Identifier: Apache-2.0
"""The tests of the plugin, by what it checks. `test_policy.py` runs them."""
