# SPDX-License-Identifier: Apache-2.0
"""From a checked series to pull requests.

In: a series whose checks have passed. Out: branches, mails and texts for upstream.
"""
