# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the product with NVFP4 weights."""

import torch

from .._quant import E2M1_VALUES

BLOCK = 16


def nvfp4_values(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Float64 values `[N, K]` of packed bytes and e4m3 scales.

    The scale of the whole tensor is not applied.
    """
    nibbles = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=weight.device)
    values = torch.cat((grid, -grid))[nibbles]
    return values * weight_scale.double().repeat_interleave(BLOCK, -1)


def nvfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.linear.nvfp4_linear.nvfp4_linear`; float64 result."""
    out = x.double() @ nvfp4_values(weight, weight_scale).T
    return out * weight_global_scale.double()
