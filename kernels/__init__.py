# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of DeepSeek-V4 for Intel XPU, references, interpreter repair."""
