# SPDX-License-Identifier: Apache-2.0
"""Python programs in forks of one process, which imports once what they share.

In: a program's words, environment and search path. Out: how it ended.
"""
