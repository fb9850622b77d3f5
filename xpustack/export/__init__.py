# SPDX-License-Identifier: Apache-2.0
"""Export a checked series as pull requests.

In: a series whose checks have passed. Out: branches, mails and texts for upstream.
"""
