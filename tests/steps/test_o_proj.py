# SPDX-License-Identifier: Apache-2.0
"""The output projection of the real layer, from weights as in a checkpoint."""

from typing import Any

import kernel_trace
import layout
import pytest
import torch

BLOCK, LARGEST = 128, 448.0
TOLERANCE = 5e-3


def load(linear: torch.nn.Module) -> torch.Tensor:
    """Give `linear` weights, in FP8 with block scales or in BF16 as it has them, let
    vLLM process them as after loading, and return what they stand for, in float64."""
    weight, scale = linear.weight, getattr(linear, "weight_scale_inv", None)
    if scale is None:
        values = torch.randn(weight.shape).to(torch.bfloat16)
        weight.data = values.to(weight.device)
        linear.quant_method.process_weights_after_loading(linear)
        return values.double()
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


def as_e4m3(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as e4m3 holds them under the least power of two for each 128 values."""
    blocks = rows.unflatten(-1, (-1, BLOCK))
    power = (blocks.abs().amax(-1, keepdim=True) / LARGEST).log2().ceil().exp2()
    return ((blocks / power).to(torch.float8_e4m3fn).double() * power).flatten(-2)


def attention(quantized: bool) -> Any:
    torch.manual_seed(0)
    return layout.attention_layer(layout.vllm_config(quantized=quantized), 0)


@pytest.mark.parametrize("quantized", [True, False], ids=["FP8", "BF16"])
def test_one_launch_and_one_product(
    quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = attention(quantized)
    weight = load(layer.wo_a)
    layer.wo_b = torch.nn.Identity()
    heads, groups, rank = layer.n_local_heads, layer.n_local_groups, layer.o_lora_rank
    at = torch.tensor([0, 1, 63, 500, 4000])
    o = torch.randn(len(at), heads, 512, dtype=torch.bfloat16)
    on_device = o.to(layout.device()), at.to(layout.device())
    with kernel_trace.traced(monkeypatch) as trace:
        got = layout.o_projection(layer, *on_device)

    rows = inverse_rope(o, layer.rotary_emb.cos_sin_cache.cpu()[at])
    rows = rows.view(len(at), groups, -1)
    if quantized and layout.O_PROJECTION_IN_FP8:
        rows = as_e4m3(rows)
    wanted = torch.einsum("tgd,grd->tgr", rows, weight.view(groups, rank, -1))
    wanted = wanted.flatten(1)
    error = float((got.cpu().double() - wanted).norm() / wanted.norm())
    print(f"figure: off by {error:.4f}, launches {trace.launches}, makes {trace.made}")
    assert error < TOLERANCE, f"the output projection is off by {error:.3f}"
    assert len(trace.launches) <= 1, f"launches {trace.launches}"
    products = [name for name in trace.made if "bmm" in name]
    assert len(products) == 1, f"multiplies by {products}"
    others = [name for name in trace.made if "empty" not in name and "vllm" not in name]
    others = [name for name in others if name not in products]
    assert len(others) <= 1, f"copies beside the product: {others}"


@pytest.mark.unchanged
def test_other_layers_stay_quantized() -> None:
    layer = attention(quantized=True)
    blocks = layer.wo_b.weight_scale_inv.numel()
    load(layer.wo_b)
    assert layer.wo_b.weight.dtype == torch.float8_e4m3fn
    assert layer.wo_b.weight_scale_inv.numel() == blocks
