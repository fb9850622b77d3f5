# SPDX-License-Identifier: Apache-2.0
"""The output projection of a real layer, from weights as in a checkpoint."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from . import kernel_trace, layer_parts, layout, model_configs, model_layers, pin_ops
from .block_fp8 import BLOCK, as_e4m3, load

TOLERANCE = 5e-3
OPS = ("deepseek_inv_rope_fp8_quant", "deepseek_inv_rope_bf16")


def attention(backend: str | None) -> Any:
    """A layer whose FP8 weights `backend` multiplies by; None has weights in BF16.

    As a model's loader does, it makes BF16 what the layer's products give."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.manual_seed(0)
    config = model_configs.vllm_config(quantized=backend is not None)
    chosen = model_configs.linear_backend(config, backend or "auto")
    with chosen, set_default_torch_dtype(torch.bfloat16):
        return model_layers.attention_layer(config, 0)


def inverse_rope(o: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Undo the interleaved rotation of the last 64 dims of `o`, `[T, H, D]`."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half].double(), table[:, None, half:].double()
    rope = o[..., -2 * half :].double()
    even, odd = rope[..., ::2], rope[..., 1::2]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1)
    return torch.cat((o[..., : -2 * half].double(), turned.flatten(-2)), -1)


def inputs(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random attention output of `layer`, and positions."""
    o = torch.randn(tokens, layer.n_local_heads, 512).to(torch.bfloat16)
    at = torch.arange(tokens) * 7
    return o.to(layout.device()), at.to(layout.device())


@dataclass
class Projection:
    """A projection's error and its cost on the device: `launches` are
    names of Triton kernels and of inverse RoPE's ops of the pin."""

    error: float
    launches: list[str]
    products: list[str]
    others: list[str]


def projected(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> Projection:
    """Project five tokens by the layer of `attention(backend)`, after one warm-up."""
    layer = attention(backend)
    weight = load(layer.wo_a)
    layer_parts.finish_loading(layer)
    layer.wo_b = torch.nn.Identity()
    heads, groups, rank = layer.n_local_heads, layer.n_local_groups, layer.o_lora_rank
    at = torch.tensor([0, 1, 63, 500, 4000])
    o = torch.randn(len(at), heads, 512, dtype=torch.bfloat16)
    on_device = o.to(layout.device()), at.to(layout.device())
    layer_parts.o_projection(layer, *on_device)
    with (
        kernel_trace.traced(monkeypatch) as trace,
        pin_ops.recorded(monkeypatch, *OPS) as calls,
    ):
        got = layer_parts.o_projection(layer, *on_device)

    rows = inverse_rope(o, layer.rotary_emb.cos_sin_cache.cpu()[at])
    rows = rows.view(len(at), groups, -1)
    if hasattr(layer.wo_a, "bmm_weight"):  # a product in FP8
        rows = as_e4m3(rows, BLOCK, power_of_two=True)
    wanted = torch.einsum("tgd,grd->tgr", rows, weight.view(groups, rank, -1))
    wanted = wanted.flatten(1)
    error = float((got.cpu().double() - wanted).norm() / wanted.norm())
    print(f"figure: off by {error:.4f}, launches {trace.launches}, makes {trace.made}")
    products = [name for name in trace.made if "bmm" in name]
    others = [name for name in trace.made if "empty" not in name and "vllm" not in name]
    others = [name for name in others if name not in products]
    return Projection(error, [*calls, *trace.launches], products, others)


def check(projection: Projection) -> None:
    """Insist on a right result from one launch, one product and at most one copy."""
    error = projection.error
    assert error < TOLERANCE, f"the output projection is off by {error:.3f}"
    assert len(projection.launches) <= 1, f"launches {projection.launches}"
    assert len(projection.products) == 1, f"multiplies by {projection.products}"
    copies = projection.others
    assert len(copies) <= 1, f"copies beside the product: {copies}"
