# SPDX-License-Identifier: Apache-2.0
"""The output projection of the real layer, from weights as in a checkpoint."""

from typing import Any

import pytest
import torch
from helpers import kernel_trace, layer_parts, layout, model_configs, model_layers
from helpers.block_fp8 import BLOCK, as_e4m3, load

TOLERANCE = 5e-3


def inverse_rope(o: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Undo the interleaved rotation of the last 64 dims of `o`, `[T, H, D]`."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half].double(), table[:, None, half:].double()
    rope = o[..., -2 * half :].double()
    even, odd = rope[..., ::2], rope[..., 1::2]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1)
    return torch.cat((o[..., : -2 * half].double(), turned.flatten(-2)), -1)


def attention(backend: str | None) -> Any:
    """A layer whose FP8 weights `backend` multiplies by; None has weights in BF16.

    As a model's loader does, it makes BF16 what the layer's products give."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.manual_seed(0)
    config = model_configs.vllm_config(quantized=backend is not None)
    chosen = model_configs.linear_backend(config, backend or "auto")
    with chosen, set_default_torch_dtype(torch.bfloat16):
        return model_layers.attention_layer(config, 0)


def case(backend: str | None) -> Any:
    """Where upstream's path is right but for the scales of XPU's own kernel, the
    others are `unchanged`."""
    right = layout.O_PROJECTION_IN_BF16 and backend not in ("auto", "fp32")
    return pytest.param(backend, marks=[pytest.mark.unchanged] if right else [])


@pytest.mark.parametrize(
    "backend",
    map(case, [*layout.BLOCK_FP8_BACKENDS, *layout.TORCH_BLOCK_FP8, None]),
    ids=lambda backend: f"FP8-{backend}" if backend else "BF16",
)
def test_one_launch_and_one_product(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = attention(backend)
    weight = load(layer.wo_a)
    layer.wo_b = torch.nn.Identity()
    heads, groups, rank = layer.n_local_heads, layer.n_local_groups, layer.o_lora_rank
    at = torch.tensor([0, 1, 63, 500, 4000])
    o = torch.randn(len(at), heads, 512, dtype=torch.bfloat16)
    on_device = o.to(layout.device()), at.to(layout.device())
    layer_parts.o_projection(layer, *on_device)
    with kernel_trace.traced(monkeypatch) as trace:
        got = layer_parts.o_projection(layer, *on_device)

    rows = inverse_rope(o, layer.rotary_emb.cos_sin_cache.cpu()[at])
    rows = rows.view(len(at), groups, -1)
    if hasattr(layer.wo_a, "bmm_weight"):  # a product in FP8
        rows = as_e4m3(rows, BLOCK, power_of_two=True)
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
def test_other_platforms_keep_wo_a_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = attention("triton")
    kernels = layout.module(f"{layout.LINEAR_KERNELS}.scaled_mm.triton")
    another = layout.another_platform(kernels.current_platform)
    monkeypatch.setattr(kernels, "current_platform", another)
    load(layer.wo_a)
    assert layer.wo_a.weight.dtype == torch.float8_e4m3fn
    assert hasattr(layer.wo_a, "weight_scale_inv")


# Where all platforms have one layer, the names that the others call in it.
OTHERS = {"CUDA": "fused_inv_rope_fp8_quant", "ROCm": "rocm_inv_rope_einsum"}


@pytest.mark.unchanged
@pytest.mark.may_skip
@pytest.mark.parametrize("platform", [] if layout.WITH_XPU_FOLDER else OTHERS)
def test_other_platforms_keep_their_projection(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = attention(None)
    layout.pretend_cuda(monkeypatch, rocm=platform == "ROCm")

    def called(*args: object, **kwargs: object) -> None:
        raise InterruptedError(platform)

    monkeypatch.setattr(layout.module(layout.ATTENTION), OTHERS[platform], called)
    o = torch.zeros(1, layer.n_local_heads, 512, dtype=torch.bfloat16)
    with pytest.raises(InterruptedError, match=platform):
        layer_parts.o_projection(layer, o, torch.tensor([0]))


@pytest.mark.unchanged
@pytest.mark.parametrize("backend", layout.BLOCK_FP8_BACKENDS)
def test_other_layers_multiply_as_before(backend: str) -> None:
    layer = attention(backend)
    weight = load(layer.wo_b)
    x = torch.randn(3, weight.shape[1], dtype=torch.bfloat16)
    got = layer.wo_b.quant_method.apply(layer.wo_b, x.to(layout.device()))
    wanted = x.double() @ weight.T
    assert (got.cpu().double() - wanted).norm() < 0.05 * wanted.norm()
