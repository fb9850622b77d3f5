# SPDX-License-Identifier: Apache-2.0
"""The router's logits are computed in float32, as the model asks, not rounded to
BF16."""

from typing import Any

import pytest
import torch
from helpers import model_configs, moe_layers

HIDDEN, EXPERTS, TOPK, TOKENS = 256, 256, 6, 64


@pytest.fixture
def gate() -> Any:
    """The router of the model, in BF16 as a checkpoint has it."""
    torch.manual_seed(0)
    config = model_configs.vllm_config(quantized=True)
    config.model_config.hf_config.n_routed_experts = EXPERTS
    config.model_config.hf_config.num_experts_per_tok = TOPK
    gate = moe_layers.experts(config).gate
    gate.weight.data.copy_(torch.randn(gate.weight.shape))
    return gate


def inputs(gate: Any) -> torch.Tensor:
    return torch.randn(TOKENS, gate.weight.shape[1], dtype=torch.bfloat16)


def wanted(gate: Any, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ gate.weight.cpu().double().T


def chosen(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(TOPK, dim=-1).indices.sort(-1).values


def test_logits_are_not_rounded(gate: Any) -> None:
    x = inputs(gate)
    logits = gate(x.to(gate.weight.device))[0].cpu()
    right = wanted(gate, x)
    error = float((logits.double() - right).norm() / right.norm())
    moved = int((chosen(logits) != chosen(right)).any(-1).sum())
    found = (
        f"the router's logits are off by {error:.1e}, and {moved} of {TOKENS} tokens "
        "go to another expert"
    )
    print(f"figure: {found}")
    assert logits.dtype == torch.float32
    assert error < 1e-5, found


def test_logits_are_not_rounded_where_float32_is_asked_for_later() -> None:
    gate = moe_layers.gate(HIDDEN, EXPERTS)
    gate.set_out_dtype(torch.float32)
    x = inputs(gate)
    logits = gate(x.to(gate.weight.device))[0].cpu()
    torch.testing.assert_close(logits.double(), wanted(gate, x), rtol=1e-4, atol=1e-4)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_nothing_asked_for_keeps_bf16() -> None:
    gate = moe_layers.gate(HIDDEN, EXPERTS)
    x = inputs(gate).to(gate.weight.device)
    logits = gate(x)[0]
    assert torch.equal(logits, torch.nn.functional.linear(x, gate.weight))


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_a_bias_takes_the_linear_layer() -> None:
    gate = moe_layers.gate(HIDDEN, EXPERTS, bias=True, out_dtype=torch.float32)
    x = inputs(gate).to(gate.weight.device)
    rounded = torch.nn.functional.linear(x, gate.weight, gate.bias)
    assert torch.equal(gate(x)[0], rounded.float())


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.parametrize("platform", ["CUDA", "ROCm", "CPU"])
def test_other_platforms_choose_as_before(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    multiplies = {
        "CUDA": True,
        "ROCm": moe_layers.rocm_multiplies_into_float32(),
        "CPU": False,
    }
    moe_layers.pretend(monkeypatch, platform)
    gate = moe_layers.gate(HIDDEN, EXPERTS, out_dtype=torch.float32)
    assert gate.allow_cublas_router_gemm is multiplies[platform]
