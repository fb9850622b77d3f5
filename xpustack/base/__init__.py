# SPDX-License-Identifier: Apache-2.0
"""From a pin to the commit of its sdist.

In: `releases.toml` and a package index. Out: a verified archive, and one commit per
release in the store of all trees.
"""
