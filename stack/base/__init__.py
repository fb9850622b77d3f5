# SPDX-License-Identifier: Apache-2.0
"""Downloads a pinned release, verifies it and imports it as a git commit.

In: `releases.toml` and a package index. Out: a verified archive, and one commit per
release in the store of all trees.
"""
