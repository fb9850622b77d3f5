# SPDX-License-Identifier: Apache-2.0
"""The records that `tests/proof/e2e --write-table` writes, and the tables made of them.

In: what a run found. Out: rows in `docs/data`, and a section of a page.
"""
