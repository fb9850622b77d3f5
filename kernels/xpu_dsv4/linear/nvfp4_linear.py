# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Matrix product with NVFP4 weights: e2m1 values, an e4m3 scale for each 16 of them.

A value times its scale has at most six significant bits, so it is exact in bf16: the
product runs on bf16 matrix units and accumulates in fp32. The weights stay packed in
memory. The fp32 scale of the whole tensor multiplies the sum.
"""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from .._fp4 import e2m1_value
from .._fp8 import E4M3_SHIFT, e4m3_shifted
from .._launch import cdiv, launch_options
from .._triton import tl, triton

NVFP4_BLOCK = 16
"""Values that share an e4m3 scale."""


@triton.jit(do_not_specialize=["num_rows"])
def _nvfp4_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    global_scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    x_stride,
    weight_stride,
    scale_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NVFP4_BLOCK: tl.constexpr,
    E4M3_SHIFT: tl.constexpr = E4M3_SHIFT,
):
    column_offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_offs = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = row_offs < num_rows  # [BLOCK_M]
    column_mask = column_offs < num_columns  # [BLOCK_N]
    x_row_ptrs = x_ptr + row_offs.to(tl.int64)[:, None] * x_stride  # [BLOCK_M, 1]
    # [1, BLOCK_N]
    weight_row_ptrs = weight_ptr + column_offs.to(tl.int64)[None, :] * weight_stride
    # [1, BLOCK_N]
    scale_row_ptrs = scale_ptr + column_offs.to(tl.int64)[None, :] * scale_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in range(0, depth, BLOCK_K):
        k_offs = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        k_mask = k_offs < depth  # [BLOCK_K]
        # [BLOCK_M, BLOCK_K]
        x = tl.load(
            x_row_ptrs + k_offs[None, :],
            mask=row_mask[:, None] & k_mask[None, :],
            other=0.0,
        )
        weight_mask = k_mask[:, None] & column_mask[None, :]  # [BLOCK_K, BLOCK_N]
        # [BLOCK_K, BLOCK_N]
        code_pairs = tl.load(
            weight_row_ptrs + k_offs[:, None] // 2, mask=weight_mask, other=0
        ).to(tl.int32)
        # [BLOCK_K, BLOCK_N]
        scales = tl.load(
            scale_row_ptrs + k_offs[:, None] // NVFP4_BLOCK, mask=weight_mask, other=0
        )
        # [BLOCK_K, BLOCK_N]
        values = e2m1_value((code_pairs >> (4 * (k_offs[:, None] % 2))) & 0xF)
        # [BLOCK_K, BLOCK_N]
        weights = (values * (e4m3_shifted(scales) * 2.0**E4M3_SHIFT)).to(tl.bfloat16)
        acc = tl.dot(x, weights, acc)
    acc *= tl.load(global_scale_ptr)
    # [BLOCK_M, BLOCK_N]
    out_ptrs = (
        out_ptr + row_offs.to(tl.int64)[:, None] * out_stride + column_offs[None, :]
    )
    tl.store(
        out_ptrs, acc.to(tl.bfloat16), mask=row_mask[:, None] & column_mask[None, :]
    )


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
        x (torch.Tensor):
            Rows of shape `[M, K]`, bf16; may be strided. K is a multiple of 16.
        weight (torch.Tensor):
            e2m1 codes of shape `[N, K / 2]`, uint8: two per byte, the even one in the
            low nibble.
        weight_scale (torch.Tensor):
            Scales of shape `[N, K / 16]`, float8_e4m3fn.
        weight_global_scale (torch.Tensor):
            Scale of the whole tensor: one fp32 value on the device.

    Returns:
        Product of shape `[M, N]`, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_dtype("x", x, torch.bfloat16)
    check_shape("x", x, None, None)
    check_inner_contiguous("x", x)
    rows, depth = x.shape
    if depth % NVFP4_BLOCK:
        fail("x.shape[1]", depth, f"a multiple of {NVFP4_BLOCK}")
    check_dtype("weight", weight, torch.uint8)
    check_shape("weight", weight, None, depth // 2)
    check_inner_contiguous("weight", weight)
    columns = weight.shape[0]
    check_dtype("weight_scale", weight_scale, torch.float8_e4m3fn)
    check_shape("weight_scale", weight_scale, columns, depth // NVFP4_BLOCK)
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
        block_m = 16 if rows <= 16 else 64
        block_n = 64
        grid = (cdiv(columns, block_n), cdiv(rows, block_m))
        _nvfp4_linear_kernel[grid](
            x,
            weight,
            weight_scale.view(torch.uint8),
            weight_global_scale,
            out,
            rows,
            columns,
            depth,
            x.stride(0),
            weight.stride(0),
            weight_scale.stride(0),
            out.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=64,
            NVFP4_BLOCK=NVFP4_BLOCK,
            **launch_options(x.device, num_warps=8, grf=256),
        )
    return out
