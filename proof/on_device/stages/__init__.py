# SPDX-License-Identifier: Apache-2.0
"""A device's owner proves, compares, tunes and serves on it, and gets a report.

In: a checkout, and a Python with torch and Triton for the device. Out: a folder with
one result per stage, the report for programs and for people, and one archive to send.
"""
