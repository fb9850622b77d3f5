# SPDX-License-Identifier: Apache-2.0
"""What every other package builds on: errors, files, processes, git, the cache.

No module in here knows about releases, steps or checks.
"""
