# SPDX-License-Identifier: Apache-2.0
"""What every room stands on: errors, files, processes, git, the cache.

Nothing in here knows of a release, a step or a check.
"""
