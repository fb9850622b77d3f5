# SPDX-License-Identifier: Apache-2.0
"""Checks that build, lint and test series, and what they have proven.

In: a series and the cache. Out: results, each computed once for what it depends on.
"""
