# SPDX-License-Identifier: Apache-2.0
"""The generated site: pages of prose, tables and charts, static and without a network.

In: the repository's pages, the series, the list of defects, records of measurements.
Out: a folder of HTML that works from a disk.
"""
