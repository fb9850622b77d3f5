# SPDX-License-Identifier: Apache-2.0
"""One function pads the shared experts of every platform, as each padded its own."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

HIDDEN, BLOCK = 256, 128
MODELS = ["deepseek_v4.nvidia", "deepseek_v41.nvidia"]


class Shared:
    """A parameter of shared experts that keeps what its loader is given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def weight_loader(self, owner: Any, weight: torch.Tensor, *shard: int) -> None:
        self.given.append(weight)


def given_by(folder: str, intermediate: int, of: int) -> dict[str, torch.Tensor]:
    """The tensors that another platform's loader gives the parameters, by checkpoint
    name. The model itself has no layers."""
    module = layout.module(f"vllm.models.{folder}.model")
    config = model_configs.vllm_config(quantized=True)
    parameters = {
        f"layers.1.ffn.shared_experts.{name}.{kind}": Shared()
        for name in ("gate_up_proj", "down_proj")
        for kind in ("weight", "weight_scale_inv")
    }
    model = module.DeepseekV4Model.__new__(module.DeepseekV4Model)
    torch.nn.Module.__init__(model)
    experts = SimpleNamespace(ffn=SimpleNamespace(experts=None))
    for name, value in {
        "config": config.model_config.hf_config,
        "quant_config": config.quant_config,
        "parallel_config": config.parallel_config,
        "use_sequence_parallel": False,
        "layers": [experts, experts],
        "get_expert_mapping": list,
        "named_parameters": parameters.items,
    }.items():
        setattr(model, name, value)
    state = layout.module("vllm.distributed.parallel_state")
    group = SimpleNamespace(world_size=of, rank_in_group=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "get_tp_group", lambda: group)
        model.load_weights(
            (f"layers.1.ffn.shared_experts.{name}", weight)
            for name, weight in as_vllm_names_them(intermediate)
        )
    gates, downs = ["w1", "w3"], ["down_proj"]
    return {
        f"{part}.{kind}": weight
        for fused, parts in (("gate_up_proj", gates), ("down_proj", downs))
        for kind in ("weight", "weight_scale_inv")
        for part, weight in zip(
            parts,
            parameters[f"layers.1.ffn.shared_experts.{fused}.{kind}"].given,
            strict=True,
        )
    }


def as_vllm_names_them(intermediate: int) -> Iterator[tuple[str, torch.Tensor]]:
    """FP8 weights and their blocks' scales, of random bytes."""
    torch.manual_seed(0)
    for part in ("w1", "w3", "down_proj"):
        shape = (intermediate, HIDDEN)
        if part == "down_proj":
            shape = (HIDDEN, intermediate)
        blocks = tuple(size // BLOCK for size in shape)
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        yield f"{part}.weight", weight
        scale = torch.randint(100, 130, blocks, dtype=torch.uint8)
        yield f"{part}.weight_scale_inv", scale.view(torch.float8_e8m0fnu)


def test_the_function_is_common() -> None:
    common = layout.module("vllm.models.deepseek_v4.common.shared_experts")
    theirs = layout.module("vllm.models.deepseek_v4.nvidia.model")
    assert theirs.pad_shared_expert_weight is common.pad_shared_expert_weight


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.parametrize("folder", MODELS)
@pytest.mark.parametrize(("blocks", "of"), [(3, 2), (4, 2), (3, 1), (1, 8)])
def test_cuda_pads_as_before(folder: str, blocks: int, of: int) -> None:
    given = given_by(folder, blocks * BLOCK, of)
    whole = -(-blocks // of) * of
    for name, tensor in as_vllm_names_them(blocks * BLOCK):
        split = int("down_proj" in name)
        size = whole if "scale" in name else whole * BLOCK
        assert given[name].shape[split] == size
        assert given[name].shape[1 - split] == tensor.shape[1 - split]
        values = given[name].view(torch.uint8)
        kept, added = values.tensor_split([tensor.shape[split]], split)
        assert torch.equal(kept, tensor.view(torch.uint8))
        assert not added.any()
