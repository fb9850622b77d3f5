# SPDX-License-Identifier: Apache-2.0
"""Linear layers with INT4 weights and activations in 16 bits."""

import torch

from standins.emulated_xpu.wheel.implementations import implements


@implements("_xpu_C::int4_gemm_w4a16")
def int4_gemm_w4a16(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    B_scale: torch.Tensor,
    B_zp: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None,
) -> torch.Tensor:
    """`[M, K] @ [K, N]`, summed in fp32; w[k, n] = (code - zero) * scale.

    B has eight codes per word along K, the first in the lowest bits, and is the
    transposed view of contiguous `[N, K / 8]`; scales are `[K / group_size, N]`, and
    one zero serves all of B.
    """
    if g_idx is not None or B_zp.numel() != 1:
        raise NotImplementedError("INT4 with an order of columns, or several zeros")
    if not B.t().is_contiguous():
        raise ValueError("B is not the transposed view of a contiguous tensor")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((B.t()[..., None] >> shifts) & 15).flatten(-2)  # [N, K]
    scales = B_scale.t().float().repeat_interleave(group_size, dim=-1)
    out = A.float() @ ((codes - B_zp) * scales).T
    if bias is not None:
        out = out + bias.float()
    return out.to(A.dtype)
