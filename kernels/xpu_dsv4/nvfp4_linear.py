# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Product with NVFP4 weights: e2m1 values under an e4m3 scale for each 16 of them.

A value times its scale has at most six significant bits, so it is exact in bf16: the
product runs on bf16 matrix units and accumulates in fp32. The weights stay packed in
memory; the tensor's own fp32 scale multiplies the sum.
"""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._fp4 import e2m1_value
from ._fp8 import e4m3_shifted
from ._launch import launch_options
from ._triton import tl, triton

NVFP4_BLOCK = 16


@triton.jit
def _nvfp4_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    global_scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    x_stride,
    weight_stride,
    scale_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real_row, real_column = row < num_rows, column < num_columns
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weights = weight_ptr + column.to(tl.int64)[None, :] * weight_stride
    scales = scale_ptr + column.to(tl.int64)[None, :] * scale_stride
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, size, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < size
        x = tl.load(
            x_rows + k[None, :], mask=real_row[:, None] & inside[None, :], other=0.0
        )
        wanted = inside[:, None] & real_column[None, :]
        pairs = tl.load(weights + k[:, None] // 2, mask=wanted, other=0).to(tl.int32)
        scale = tl.load(scales + k[:, None] // BLOCK, mask=wanted, other=0)
        value = e2m1_value((pairs >> (4 * (k[:, None] % 2))) & 15)
        weight = (value * (e4m3_shifted(scale) * 2.0**120)).to(tl.bfloat16)
        acc = tl.dot(x, weight, acc)
    acc *= tl.load(global_scale_ptr)
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out, acc.to(tl.bfloat16), mask=real_row[:, None] & real_column[None, :])


def nvfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: torch.Tensor,
) -> torch.Tensor:
    """`x @ w.T` with w in NVFP4 and x in bf16 (W4A16). One launch.

    w[n, k] = e2m1(code[n, k]) * weight_scale[n, k // 16] * weight_global_scale, the
    layout of ModelOpt's and compressed-tensors' NVFP4 checkpoints.

    Args:
        x: of shape `[M, K]`, bf16; rows may be strided. K is a multiple of 16.
        weight: of shape `[N, K / 2]`, uint8: two codes a byte, the even one low.
        weight_scale: of shape `[N, K / 16]`, float8_e4m3fn.
        weight_global_scale: one fp32 value on the device.

    Returns:
        Of shape `[M, N]`, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_dtype("x", x, torch.bfloat16)
    check_shape("x", x, None, None)
    check_inner_contiguous("x", x)
    rows, size = x.shape
    if size % NVFP4_BLOCK:
        fail("x.shape[1]", size, f"a multiple of {NVFP4_BLOCK}")
    check_dtype("weight", weight, torch.uint8)
    check_shape("weight", weight, None, size // 2)
    check_inner_contiguous("weight", weight)
    columns = weight.shape[0]
    check_dtype("weight_scale", weight_scale, torch.float8_e4m3fn)
    check_shape("weight_scale", weight_scale, columns, size // NVFP4_BLOCK)
    check_inner_contiguous("weight_scale", weight_scale)
    check_dtype("weight_global_scale", weight_global_scale, torch.float32)
    if weight_global_scale.numel() != 1:
        fail("weight_global_scale.shape", list(weight_global_scale.shape), "one value")
    check_same_device(
        x=x,
        weight=weight,
        weight_scale=weight_scale,
        weight_global_scale=weight_global_scale,
    )
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=x.device)
    if rows and columns:
        tile = 16 if rows <= 16 else 64
        width = 64
        grid = (triton.cdiv(columns, width), triton.cdiv(rows, tile))
        _nvfp4_linear_kernel[grid](
            x,
            weight,
            weight_scale.view(torch.uint8),
            weight_global_scale,
            out,
            rows,
            columns,
            size,
            x.stride(0),
            weight.stride(0),
            weight_scale.stride(0),
            out.stride(0),
            ROWS=tile,
            COLUMNS=width,
            DEPTH=64,
            BLOCK=NVFP4_BLOCK,
            **launch_options(x.device, num_warps=8, grf=256),
        )
    return out
