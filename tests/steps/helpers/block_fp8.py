# SPDX-License-Identifier: Apache-2.0
"""Linear layers with FP8 weights in blocks, as a DeepSeek-V4 checkpoint has them."""

import torch

BLOCK = 128
LARGEST = 448.0


def load(linear: torch.nn.Module) -> torch.Tensor:
    """Give `linear` weights, in FP8 with block scales or in BF16 as it has them, let
    vLLM process them as after loading, and return what they stand for, in float64."""
    weight, scale = linear.weight, getattr(linear, "weight_scale_inv", None)
    if scale is None:
        values = torch.randn(weight.shape).to(torch.bfloat16)
        weight.data = values.to(weight.device)
        linear.quant_method.process_weights_after_loading(linear)
        return values.double()
    rows, columns = weight.shape
    values = torch.randn(weight.shape).to(torch.float8_e4m3fn)
    powers = torch.ldexp(torch.ones(()), torch.randint(-8, 0, scale.shape))
    weight.data.copy_(values)
    scale.data.copy_(powers)
    linear.quant_method.process_weights_after_loading(linear)
    each = powers.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.double() * each[:rows, :columns].double()


def as_e4m3(rows: torch.Tensor, group: int, power_of_two: bool) -> torch.Tensor:
    """`rows` as e4m3 holds them under one scale for each `group` values."""
    pad = -rows.shape[-1] % group
    blocks = torch.nn.functional.pad(rows.float(), (0, pad)).unflatten(-1, (-1, group))
    scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-10)
    if power_of_two:
        mantissa, exponent = scale.frexp()
        scale = torch.ldexp(torch.ones(()), exponent - (mantissa == 0.5).int())
    codes = (blocks / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).flatten(-2)[..., : rows.shape[-1]]
