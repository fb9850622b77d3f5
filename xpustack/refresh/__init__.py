# SPDX-License-Identifier: Apache-2.0
"""From a release's series to the next release's.

In: a series and a newer base. Out: a series carried over as far as it goes, and what
upstream did meanwhile.
"""
