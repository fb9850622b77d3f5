# SPDX-License-Identifier: Apache-2.0
"""From a pin to the commit of its sdist.

In: `releases.toml` and an index of packages. Out: a verified archive, and one commit
a release in the store of all trees.
"""
