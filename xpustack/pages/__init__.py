# SPDX-License-Identifier: Apache-2.0
"""From the series and its proven checks to pages.

In: a project and the results that the cache holds. Out: Markdown.
"""
