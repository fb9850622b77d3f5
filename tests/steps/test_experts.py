# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts in Triton serve a device that vllm-xpu-kernels refuses."""

from typing import Any

import pytest
import torch
from helpers import layout, model_layers
from helpers.mxfp4_experts import dequantized, weights

EXPERTS, TOPK, HIDDEN, INTER, TOKENS = 4, 2, 128, 96, 7
LIMIT = 1.0
"""About a quarter of the projections are beyond it."""
REFUSED = "pvc_vg"
"""An architecture that is no Xe2 and no Xe3 to vllm-xpu-kernels."""
ARCHITECTURE = "EMULATED_XPU_ARCHITECTURE"


class Layer(torch.nn.Module):
    """The weights of a layer's experts, as a checkpoint has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w13 = weights(EXPERTS, 2 * INTER, HIDDEN, (118, 123))
        self.w2 = weights(EXPERTS, HIDDEN, INTER, (118, 123))
        self.x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.topk_weights, ids = torch.rand(TOKENS, EXPERTS).topk(TOPK)
        self.topk_ids = ids.to(torch.int32)

    def reference(self, ids: torch.Tensor) -> torch.Tensor:
        """In float64; an expert of -1 adds nothing."""
        gate_up = torch.einsum("th,enh->ten", self.x.double(), dequantized(*self.w13))
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        each = torch.nn.functional.silu(gate) * up
        rows = torch.einsum("ten,eon->teo", each, dequantized(*self.w2))
        here = (ids >= 0).double() * self.topk_weights
        index = ids.clamp(min=0).long()[..., None].expand(-1, -1, HIDDEN)
        return (rows.gather(1, index) * here[..., None]).sum(1)


def config(**others: Any) -> Any:
    return model_layers.experts_config(
        activation="SILU",
        num_experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        inter=INTER,
        **others,
    )


def oracle() -> Any:
    return layout.module(f"{layout.FUSED_MOE}.oracle.mxfp4")


def run(
    layer: Layer,
    experts_config: Any,
    ids: torch.Tensor,
    experts: torch.Tensor | None,
    limit: float | None = LIMIT,
) -> torch.Tensor:
    """What the experts give that the oracle selects, converts weights for and makes."""
    backend, kernel = oracle().select_deepseek_v4_mxfp4_moe_backend(experts_config)
    device = layout.device()
    w13, w13_scale, w2, w2_scale = (
        torch.nn.Parameter(tensor.clone().to(device), requires_grad=False)
        for tensor in (*layer.w13, *layer.w2)
    )
    w13, w2, w13_scale, w2_scale, *_ = (
        oracle().convert_weight_to_mxfp4_moe_kernel_format(
            backend, layer, w13, w2, w13_scale, w2_scale
        )
    )
    made = kernel(
        experts_config,
        oracle().make_mxfp4_moe_quant_config(
            backend, w1_scale=w13_scale, w2_scale=w2_scale, swiglu_limit=limit
        ),
    )
    act = experts_config.activation
    sizes = (TOKENS, w13.shape[1], HIDDEN, TOPK, EXPERTS, EXPERTS)
    shapes = made.workspace_shapes(*sizes, None, act)
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16).to(device)
    made.apply(
        output=output,
        hidden_states=layer.x.to(device),
        w1=w13,
        w2=w2,
        topk_weights=layer.topk_weights.to(device),
        topk_ids=ids.to(device),
        activation=act,
        global_num_experts=EXPERTS,
        expert_map=experts,
        a1q_scale=None,
        a2_scale=None,
        workspace13=torch.empty(shapes[0], dtype=torch.bfloat16, device=device),
        workspace2=torch.empty(shapes[1], dtype=torch.bfloat16, device=device),
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return output.cpu()


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_a_refused_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 96 columns, which nothing pads, a token without an expert, and its
    neighbours."""
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    layer = Layer()
    ids = layer.topk_ids.clone()
    ids[3] = -1
    got = run(layer, config(), ids, None)
    error = off_by(got, layer.reference(ids))
    print(f"figure: the experts of a device that the op refuses are off by {error:.4f}")
    assert error < 5e-3
    assert not got[3].any()


def test_experts_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    layer = Layer()
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    here = expert_map[layer.topk_ids.long()]
    got = run(layer, config(), layer.topk_ids, expert_map.to(layout.device()))
    assert off_by(got, layer.reference(here)) < 5e-3


def test_the_model_gives_the_limit_that_the_weights_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    layer = Layer()
    got = run(layer, config(model_limit=LIMIT), layer.topk_ids, None, limit=None)
    assert off_by(got, layer.reference(layer.topk_ids)) < 5e-3


@pytest.mark.parametrize("name", ["w1_bias", "w2_bias"])
def test_a_bias_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than left out of the sum."""
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    backend, kernel = oracle().select_deepseek_v4_mxfp4_moe_backend(config())
    scales = {"w1_scale": torch.zeros(1), "w2_scale": torch.zeros(1)}
    biased = oracle().make_mxfp4_moe_quant_config(
        backend, **scales, **{name: torch.zeros(EXPERTS, 1)}
    )
    with pytest.raises(NotImplementedError, match="know no bias"):
        kernel(config(), biased)


def test_triton_is_ours_on_request() -> None:
    """`moe_backend="triton"` takes them where the op would serve, too."""
    _, kernel = oracle().select_deepseek_v4_mxfp4_moe_backend(
        config(moe_backend="triton")
    )
    assert kernel.__name__ == "XPUTritonExpertsMxFp4"
    assert not kernel._supports_no_act_and_mul(), "experts without a gate are taken"
    for name in ("triton", "xpu"):
        (backend,) = oracle().map_mxfp4_backend(name)
        assert backend.value == {"triton": "XPU_TRITON", "xpu": "XPU"}[name]


def test_no_column_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    backend, _ = oracle().select_deepseek_v4_mxfp4_moe_backend(config())
    round_up = oracle().mxfp4_round_up_hidden_size_and_intermediate_size
    assert round_up(backend, 5120, 288) == (5120, 288)


@pytest.mark.unchanged
def test_other_platforms_keep_their_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    another = layout.another_platform(oracle().current_platform)
    monkeypatch.setattr(oracle(), "current_platform", another)
    assert [each.value for each in oracle().map_mxfp4_backend("triton")] == ["TRITON"]


@pytest.mark.unchanged
def test_xe3_keeps_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARCHITECTURE, "xe3")
    _, kernel = oracle().select_deepseek_v4_mxfp4_moe_backend(config())
    assert kernel.__name__ == "XPUExpertsMxFp4"


@pytest.mark.unchanged
def test_xe2_keeps_the_op() -> None:
    backend, kernel = oracle().select_deepseek_v4_mxfp4_moe_backend(config())
    assert (backend.value, kernel.__name__) == ("XPU", "XPUExpertsMxFp4")
    layer = Layer()
    got = run(layer, config(), layer.topk_ids, None)
    assert off_by(got, layer.reference(layer.topk_ids)) < 6e-3
