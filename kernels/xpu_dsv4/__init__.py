# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels for DeepSeek-V4 on Intel XPU.

Names inside a kernel tell what a value is:

| name | value |
|---|---|
| `x_ptr` | a pointer |
| `x_ptrs` | a tile of pointers |
| `x_offs` | a tile of places: along an axis (`head_offs`), or after a pointer |
| `x_mask` | a tile of booleans |
| `x_stride` | elements of tensor x between rows; `x_head_stride` between heads |
| `BLOCK_H` | size of a tile along Heads, N keys, Dims, Tokens, Requests or Splits |
| `BLOCK_M`, `BLOCK_N`, `BLOCK_K` | sizes of the tiles of a matrix product |
| `BLOCK_SIZE` | tokens per page, as everywhere in vLLM |
| `UPPER_CASE` | any other constant of the compiled kernel |

Every other name is a scalar, or a tile of values. A name keeps its type through a
function. Where a tile is made, a comment gives its shape: at the end of the line, or
above if it does not fit. Element-wise functions say that they are: they take scalars or
tiles of any shape, and their names are those of one element.

Triton reads no plain globals, so a constant of a module becomes a parameter with a
default: `HEAD_DIM: tl.constexpr = HEAD_DIM`.
"""
