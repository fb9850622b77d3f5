# SPDX-License-Identifier: Apache-2.0
import triton
import triton.language as tl

__all__ = ["tl", "triton"]
