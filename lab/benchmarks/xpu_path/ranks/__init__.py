# SPDX-License-Identifier: Apache-2.0
"""The same on two GPUs of one machine: sums, graphs, transfers and times over ranks."""
