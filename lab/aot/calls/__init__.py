# SPDX-License-Identifier: Apache-2.0
"""What is compiled: recorded calls of each public op."""
