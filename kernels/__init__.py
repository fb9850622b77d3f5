# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for DeepSeek-V4 on Intel XPU, their references, the interpreter."""
