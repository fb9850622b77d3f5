# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of DeepSeek-V4 for Intel XPU, their references and the interpreter repair."""
