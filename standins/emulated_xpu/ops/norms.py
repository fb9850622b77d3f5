# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms."""

import torch

from standins.emulated_xpu.wheel.implementations import implements


@implements("_C::rms_norm")
def rms_norm(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    """Write `input / rms(input) * weight` over the last dimension."""
    x = input.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    result.copy_(x if weight is None else x * weight.float())


@implements("_C::fused_add_rms_norm")
def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Add `input` into `residual` and write the sum's norm into `input`."""
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)
