# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of every kernel to Intel machine code, and its report."""
