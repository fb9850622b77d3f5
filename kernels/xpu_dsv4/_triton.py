# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import triton
import triton.language as tl

__all__ = ["tl", "triton"]
