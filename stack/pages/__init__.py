# SPDX-License-Identifier: Apache-2.0
"""Writes the pages that show a series and the results of its checks.

In: a project and the results that the cache holds. Out: Markdown.
"""
