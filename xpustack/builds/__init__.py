# SPDX-License-Identifier: Apache-2.0
"""From a tree to what it installs.

In: a tree of the store. Out: a folder of installed files with its manifest, built by
vLLM's own build backend or derived from a neighbour's.
"""
