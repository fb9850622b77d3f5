# SPDX-License-Identifier: Apache-2.0
"""Quantization of activations to FP8, with one scale per group of a row or per row."""

import torch

from standins.emulated_xpu.wheel.formats import next_power_of_two, quotient
from standins.emulated_xpu.wheel.implementations import implements


@implements("_C::per_token_group_fp8_quant")
def per_token_group_fp8_quant(
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool = False,
    dummy_is_tma_aligned: bool = False,
) -> None:
    """Write `input / scale` to `output_q` and the fp32 scales to `output_s`.

    The scale of a group is `max(amax, eps) / fp8_max`; `scale_ue8m0` rounds it up to a
    power of two. 0.1.8 takes eight arguments; later versions take two more and
    ignore them.

    Args:
        input: `[..., K]`, contiguous, K a multiple of `group_size`.
        output_q: of `input`'s shape, FP8.
        output_s: `[..., K / group_size]`, may be strided.

    Raises:
        ValueError: a shape or stride that the kernel would read or write wrongly.
    """
    if not input.is_contiguous() or input.shape[-1] % group_size:
        raise ValueError(
            f"per_token_group_fp8_quant: input {tuple(input.shape)} must be contiguous"
            f" in groups of {group_size}"
        )
    groups = input.float().unflatten(-1, (-1, group_size))
    scale = quotient(groups.abs().amax(-1).clamp(min=eps), fp8_max)
    if scale_ue8m0:
        scale = next_power_of_two(scale)
    output_s.copy_(scale)
    values = (groups / scale[..., None]).clamp(fp8_min, fp8_max)
    output_q.copy_(values.flatten(-2))


@implements("_C::dynamic_per_token_scaled_fp8_quant")
def dynamic_per_token_scaled_fp8_quant(
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    scale_ub: torch.Tensor | None,
) -> None:
    """Write `input / scale` to `result` and a scale for each row, `[T, 1]`, to `scale`.

    The scale takes the row's largest value, at most `scale_ub`, to the largest code.
    """
    limit = torch.finfo(result.dtype).max
    largest = input.float().abs().amax(-1, keepdim=True)
    if scale_ub is not None:
        largest = largest.clamp(max=float(scale_ub))
    scale.copy_(quotient(largest, limit))
    values = input.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)
    result.copy_(values.clamp(-limit, limit))


@implements("_C::static_scaled_fp8_quant")
def static_scaled_fp8_quant(
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    group_shape: tuple[int, int] | None = None,
) -> None:
    """Write `input / scale` to `result`, with the one scale that is given.

    Raises:
        NotImplementedError: scales of groups, which nothing here asks for.
    """
    if group_shape is not None or scale.numel() != 1:
        raise NotImplementedError("static_scaled_fp8_quant: one scale is all it takes")
    limit = torch.finfo(result.dtype).max
    result.copy_((input.float() / scale).clamp(-limit, limit))
