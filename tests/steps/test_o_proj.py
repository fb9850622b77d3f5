# SPDX-License-Identifier: Apache-2.0
"""The output projection of the real layer, from FP8 weights as in a checkpoint."""

from typing import Any

import layout
import pytest
import torch

TOKENS, BLOCK = 5, 128


def load(linear: torch.nn.Module) -> torch.Tensor:
    """Give `linear` FP8 weights with block scales, let vLLM process them as after
    loading, and return what they stand for, in float64."""
    weight, scale = linear.weight, linear.weight_scale_inv
    values = torch.randn(weight.shape).to(torch.float8_e4m3fn)
    powers = torch.ldexp(torch.ones(()), torch.randint(-8, 0, scale.shape))
    weight.data.copy_(values)
    scale.data.copy_(powers)
    linear.quant_method.process_weights_after_loading(linear)
    each = powers.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.double() * each.double()


def inverse_rope(o: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Undo the interleaved rotation of the last 64 dims of `o`, `[T, H, D]`."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half].double(), table[:, None, half:].double()
    rope = o[..., -2 * half :].double()
    even, odd = rope[..., ::2], rope[..., 1::2]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1)
    return torch.cat((o[..., : -2 * half].double(), turned.flatten(-2)), -1)


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    return layout.attention_layer(layout.vllm_config(quantized=True), 0)


def test_wo_a_reads_its_scales_in_checkpoint_order(layer: Any) -> None:
    weight = load(layer.wo_a)
    layer.wo_b = torch.nn.Identity()
    heads, groups, rank = layer.n_local_heads, layer.n_local_groups, layer.o_lora_rank
    o = torch.randn(TOKENS, heads, 512, dtype=torch.bfloat16)
    positions = torch.tensor([0, 1, 63, 500, 4000])
    device = layout.device()
    got = layer._o_proj(o.to(device), positions.to(device)).cpu().double()

    table = layer.rotary_emb.cos_sin_cache.cpu()[positions]
    rows = inverse_rope(o, table).view(TOKENS, groups, -1)
    wanted = torch.einsum("tgd,grd->tgr", rows, weight.view(groups, rank, -1))
    wanted = wanted.flatten(1)
    error = float((got - wanted).norm() / wanted.norm())
    assert error < 5e-3, f"the output projection is off by {error:.3f}"


def test_nothing_is_dequantized_in_a_call(layer: Any) -> None:
    load(layer.wo_a)
    dtype = layer.wo_a.weight.dtype
    assert dtype == torch.bfloat16, f"each call must dequantize wo_a from {dtype}"


@pytest.mark.unchanged
def test_other_layers_stay_quantized(layer: Any) -> None:
    blocks = layer.wo_b.weight_scale_inv.shape
    load(layer.wo_b)
    assert layer.wo_b.weight.dtype == torch.float8_e4m3fn
    assert layer.wo_b.weight_scale_inv.shape == tuple(reversed(blocks))
