# SPDX-License-Identifier: Apache-2.0
"""The draft model loads its layer's weights under the checkpoint's names."""

from typing import Any

import pytest
import torch
from helpers import model_configs, model_layers

BLOCK = "mtp_block"
# Of a checkpoint's `mtp.0.`: where the draft layer has it.
NAMES = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
    "attn_norm.weight": f"{BLOCK}.attn_norm.weight",
    "ffn_norm.weight": f"{BLOCK}.ffn_norm.weight",
    "ffn.gate.weight": f"{BLOCK}.ffn.gate.weight",
    "ffn.gate.bias": f"{BLOCK}.ffn.gate.e_score_correction_bias",
    "attn.kv_norm.weight": f"{BLOCK}.attn.kv_norm.weight",
    "hc_head_base": "hc_head_base",
}


@pytest.fixture
def draft() -> Any:
    config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    return model_layers.draft_model(config)


def load(draft: Any, names: list[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter's content by checkpoint name, and the expected content."""
    parameters = dict(draft.named_parameters())
    layer = model_configs.hf_config().num_hidden_layers
    found = {name: parameters[f"model.layers.{layer}.{NAMES[name]}"] for name in names}
    weights = {name: torch.randn(found[name].shape) for name in names}
    draft.load_weights((f"mtp.0.{name}", value) for name, value in weights.items())
    return {name: (found[name].cpu(), weights[name]) for name in names}


@pytest.mark.parametrize(
    "name", ["ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias"]
)
def test_router_and_its_norm(draft: Any, name: str) -> None:
    for got, wanted in load(draft, [name]).values():
        assert torch.equal(got, wanted.to(got.dtype))


@pytest.mark.unchanged
def test_all_else(draft: Any) -> None:
    others = [name for name in NAMES if "ffn" not in name]
    for got, wanted in load(draft, others).values():
        assert torch.equal(got, wanted.to(got.dtype))
