# SPDX-License-Identifier: Apache-2.0
"""The patch stack: its series and trees, how they are built, checked, linted and
released, and the requests that they become upstream.

In: a checkout and a release. Out: trees, results, wheels, pages, branches.
"""
