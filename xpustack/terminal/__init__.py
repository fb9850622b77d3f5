# SPDX-License-Identifier: Apache-2.0
"""How commands answer.

In: results, progress and errors. Out: lines, tables and JSON.
"""
