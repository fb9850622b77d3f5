# SPDX-License-Identifier: Apache-2.0
"""From a series to what a deployer installs.

In: the tree of the whole series. Out: a wheel with constraints, bill of materials and
provenance, or the judgement of such a wheel.
"""
