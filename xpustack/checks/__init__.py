# SPDX-License-Identifier: Apache-2.0
"""From releases to a report of what is proven.

In: a series and the cache. Out: results, each computed once for what it depends on.
"""
