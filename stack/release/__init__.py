# SPDX-License-Identifier: Apache-2.0
"""Build and verify what a deployer installs.

In: the tree of the whole series. Out: a wheel with constraints, bill of materials and
provenance, or the verdict on such a wheel.
"""
