# SPDX-License-Identifier: Apache-2.0
"""From a tree to its installed files.

In: a tree of the store. Out: a folder of installed files with its manifest, built by
vLLM's own build backend or copied from an earlier tree's.
"""
