# SPDX-License-Identifier: Apache-2.0
"""On XPU, DeepSeek-V4's modules can be imported and its layers built."""

from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import kernel_trace, layer_parts, layout, model_configs, model_layers


@pytest.mark.unchanged
def test_hyper_connections_import() -> None:
    layout.module(layout.MHC)


@pytest.mark.parametrize("compress_ratio", layout.COMPRESS_RATIOS)
def test_attention_layer_is_built(compress_ratio: int) -> None:
    layer = model_layers.attention_layer(model_configs.vllm_config(), compress_ratio)
    assert layer.compress_ratio == max(compress_ratio, 1)
    assert (layer.indexer is not None) == (compress_ratio == 4)


def test_draft_layers_run_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    mtp = layout.module(layout.MTP)
    streams: list[Any] = []

    class Layer(torch.nn.Module):
        def __init__(self, *args: Any, aux_stream_list: Any = (), **kwargs: Any):
            super().__init__()
            streams.append(aux_stream_list)

    monkeypatch.setattr(mtp, "DeepSeekV4MultiTokenPredictorLayer", Layer)
    config = model_configs.vllm_config(speculative_tokens=1)
    with model_configs.current(config), layout.worker():
        mtp.DeepSeekV4MultiTokenPredictor(vllm_config=config, prefix="model")
    assert streams == [None]


@pytest.mark.unchanged
def test_clamped_activation_needs_no_op() -> None:
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    with model_configs.current(model_configs.vllm_config()):
        activation = SiluAndMulWithClamp(10.0)
    x = torch.linspace(-30, 30, 64).view(2, 32)
    gate, up = x.double().clamp(max=10).chunk(2, dim=-1)
    want = gate * torch.sigmoid(gate) * up.clamp(min=-10)
    torch.testing.assert_close(activation(x).double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.unchanged
@pytest.mark.parametrize("hashed", (False, True))
def test_router_needs_no_op(hashed: bool) -> None:
    from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 8, generator=generator)
    bias = torch.randn(8, generator=generator)
    tokens = torch.tensor([3, 0, 2, 2, 1])
    table = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(4)])
    weights, experts = fused_topk_bias_router.fused_topk_bias(
        hidden_states=torch.zeros(5, 16),
        gating_output=logits,
        scoring_func="sqrtsoftplus",
        e_score_correction_bias=None if hashed else bias,
        topk=2,
        renormalize=True,
        input_tokens=tokens if hashed else None,
        hash_indices_table=table.int() if hashed else None,
        routed_scaling_factor=1.5,
    )
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    chosen = table[tokens] if hashed else (scores + bias).topk(2).indices
    want = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    want *= 1.5 / want.sum(dim=1, keepdim=True)
    got = torch.zeros_like(scores).scatter(1, experts.long(), weights.double())
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.unchanged
def test_no_launch_asks_for_programmatic_dependence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = layout.module(f"{layout.OPS}.fused_inv_rope_fp8_quant")
    device = layout.device()
    with kernel_trace.options_of_launches(monkeypatch) as options:
        ops.fused_inv_rope_fp8_quant(
            torch.zeros(1, 8, 512, dtype=torch.bfloat16, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(4, 64, device=device),
            n_groups=2,
            heads_per_group=4,
        )
    assert options, "no kernel was launched"
    assert not any("launch_pdl" in names for names in options)


def who_is_asked() -> ModuleType:
    """The module whose `current_platform` the attention layer reads."""
    attention = layout.module(layout.ATTENTION)
    if hasattr(attention, "current_platform"):
        return attention
    return layout.module("vllm.platforms")


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.parametrize(
    ("capability", "recipe", "aligned"),
    [((9, 0), (1, 128, 128), False), ((10, 0), (1, 1, 128), True)],
)
def test_cuda_keeps_its_recipe(
    capability: tuple[int, int],
    recipe: tuple[int, int, int],
    aligned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = who_is_asked()
    platform = layout.another_platform(asked.current_platform, capability)
    monkeypatch.setattr(asked, "current_platform", platform)
    layer = model_layers.attention_layer(model_configs.vllm_config(), 0)
    monkeypatch.setattr(layer.wo_a, "weight_scale_inv", None, raising=False)
    layer.wo_b = torch.nn.Identity()
    quantized: list[Any] = []
    multiplied: list[Any] = []

    def quantize(o: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[None, None]:
        quantized.append(kwargs["tma_aligned_scales"])
        return None, None

    monkeypatch.setattr(
        layout.module(layout.ATTENTION), "fused_inv_rope_fp8_quant", quantize
    )
    monkeypatch.setattr(
        torch.ops.vllm,
        "deepseek_v4_fp8_einsum",
        lambda *args: multiplied.append(args[-1]),
    )
    o = torch.zeros(2, layer.n_local_heads, 512, dtype=torch.bfloat16)
    layer_parts.o_projection(layer, o, torch.arange(2))
    assert quantized == [aligned]
    assert multiplied == [list(recipe)]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_a_platform_without_capability_is_still_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = who_is_asked()
    platform = layout.another_platform(asked.current_platform)
    monkeypatch.setattr(asked, "current_platform", platform)
    with pytest.raises(AssertionError, match="requires a CUDA"):
        model_layers.attention_layer(model_configs.vllm_config(), 0)
