# SPDX-License-Identifier: Apache-2.0
"""What commands print.

In: results, progress and errors. Out: lines, tables and JSON.
"""
