# SPDX-License-Identifier: Apache-2.0
"""Shared experts of three blocks, split over ranks that do not divide them."""

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers

OWN = "vllm.models.deepseek_v4.common.shared_experts"
HIDDEN, BLOCK, LIMIT = 256, 128, 10.0
# FP8 activations alone move the result by 4 to 5 per cent; a lost block by far more.
NOISE = 0.08
ATTENTION = model_layers.attention_class().__name__
SHAPES = {"w1": 0, "w3": 0, "w2": 1}
DSPARK = {"dspark_target_layer_ids": [1], "dspark_markov_rank": 8, "n_mtp_layers": 1}
OWNERS = ["model", "mtp", *(["dspark"] if layout.WITH_XPU_FOLDER else [])]


class Nothing(torch.nn.Module):
    """In place of the attention, which has no part in this."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def checkpoint(intermediate: int) -> dict[str, torch.Tensor]:
    """FP8 weights and UE8M0 scales of w1, w3 and w2, by their names' endings."""
    torch.manual_seed(0)
    tensors = {}
    for name, split in SHAPES.items():
        shape = (HIDDEN, intermediate) if split else (intermediate, HIDDEN)
        tensors[f"{name}.weight"] = torch.randn(shape).to(torch.float8_e4m3fn)
        blocks = tuple(size // BLOCK for size in shape)
        powers = torch.ldexp(torch.ones(()), torch.randint(-6, -2, blocks))
        tensors[f"{name}.scale"] = powers.to(torch.float8_e8m0fnu)
    return tensors


def named(prefix: str, intermediate: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in checkpoint(intermediate).items():
        yield f"{prefix}ffn.shared_experts.{name}", tensor


def reference(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The product w2 (silu(min(w1 x, L)) · clamp(w3 x, ±L)), in float64."""

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = tensors[f"{name}.scale"].float()
        each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = tensors[f"{name}.weight"].double() * each.double()
        return rows.double() @ weight.T

    gate = product(x, "w1").clamp(max=LIMIT)
    up = product(x, "w3").clamp(-LIMIT, LIMIT)
    return product(torch.nn.functional.silu(gate) * up, "w2")


def shared_experts(
    monkeypatch: pytest.MonkeyPatch, owner: str, intermediate: int, rank: int, of: int
) -> Any:
    """The shared experts of one rank, loaded by the loader of their owner."""
    config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    config.model_config.hf_config.moe_intermediate_size = intermediate
    config.model_config.head_dtype = torch.bfloat16
    draft = config.speculative_config.draft_model_config
    draft.hf_config = config.model_config.hf_config
    utilities = layout.module("vllm.utils.torch_utils")
    state = layout.module("vllm.distributed.parallel_state")
    with (
        model_configs.current(config),
        utilities.set_default_torch_dtype(torch.bfloat16),
    ):
        group = SimpleNamespace(world_size=of, rank_in_group=rank)
        monkeypatch.setattr(state, "get_tp_group", lambda: group)
        monkeypatch.setattr(layout.module(layout.MODEL), ATTENTION, Nothing)
        if owner == "mtp":
            kind = layout.module(layout.MTP).DeepSeekV4MTP
            made = kind(vllm_config=config, prefix="draft")
            made.load_weights(named("mtp.0.", intermediate))
            block = next(iter(made.model.layers.values())).mtp_block
        elif owner == "dspark":
            draft.hf_config.update(DSPARK)
            kind = layout.module(layout.DSPARK).DSparkDeepseekV4ForCausalLM
            made = kind(vllm_config=config, prefix="draft")
            made.load_weights(named("mtp.0.", intermediate))
            block = made.model.layers[0]
        else:
            kind = layout.module(layout.MODEL).DeepseekV4ForCausalLM
            made = kind.model_cls(vllm_config=config, prefix="model")
            mapped = kind.hf_to_vllm_mapper.apply(named("layers.1.", intermediate))
            made.load_weights(
                (name.removeprefix("model."), tensor) for name, tensor in mapped
            )
            block = made.layers[1]
        experts = block.ffn.shared_experts
        experts.act_fn.forward = experts.act_fn.forward_native
        for linear in (experts.gate_up_proj, experts.down_proj):
            linear.quant_method.process_weights_after_loading(linear)
    return experts


def off_by(
    monkeypatch: pytest.MonkeyPatch, owner: str, intermediate: int, of: int
) -> float:
    """The relative error of the ranks' sum."""
    torch.manual_seed(1)
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    parts = [
        shared_experts(monkeypatch, owner, intermediate, rank, of)(
            x.to(layout.device())
        ).cpu()
        for rank in range(of)
    ]
    wanted = reference(checkpoint(intermediate), x)
    got = torch.stack(parts).double().sum(0)
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("owner", OWNERS)
def test_ranks_that_do_not_divide_the_blocks(
    monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    error = off_by(monkeypatch, owner, 3 * BLOCK, 2)
    print(f"figure: the shared experts of two ranks are off by {error:.4f}")
    assert error < NOISE, f"the shared experts of two ranks are off by {error:.3f}"


def test_sizes_of_padded_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of two ranks: as many whole blocks, and zeros behind what is there."""
    lacks = "sizes are not divisible by weight quantization block_n"
    assert importlib.util.find_spec(OWN), lacks
    own = layout.module(OWN)
    monkeypatch.setattr(own, "get_tensor_model_parallel_world_size", lambda: 2)
    blocks = SimpleNamespace(weight_block_size=[BLOCK, BLOCK])
    assert own.pad_shared_expert_size(None, 200) == 200
    assert own.pad_shared_expert_size(blocks, 5 * BLOCK) == 6 * BLOCK
    for name, shape, padded in (
        ("w1.weight", (5 * BLOCK, 64), (6 * BLOCK, 64)),
        ("w1.weight_scale_inv", (5, 2), (6, 2)),
        (".down_proj.weight", (64, 5 * BLOCK), (64, 6 * BLOCK)),
        (".down_proj.weight_scale", (2, 5), (2, 6)),
    ):
        tensor, whole = torch.ones(shape), torch.ones(padded)
        assert own.pad_shared_expert_weight(None, name, tensor) is tensor
        assert own.pad_shared_expert_weight(blocks, name, whole) is whole
        found = own.pad_shared_expert_weight(blocks, name, tensor)
        assert (tuple(found.shape), found.sum()) == (padded, tensor.sum())


@pytest.mark.unchanged
@pytest.mark.parametrize("of", [1, 2])
def test_ranks_that_divide_them(monkeypatch: pytest.MonkeyPatch, of: int) -> None:
    assert off_by(monkeypatch, "model", 2 * BLOCK, of) < NOISE
