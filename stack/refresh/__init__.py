# SPDX-License-Identifier: Apache-2.0
"""Carry a release's series over to another release, and watch upstream.

In: a series and another base. Out: the steps that could be carried, the conflicts, and
the steps that upstream has by now.
"""
