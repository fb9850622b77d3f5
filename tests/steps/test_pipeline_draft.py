# SPDX-License-Identifier: Apache-2.0
"""A draft model on the last pipeline stage gets what the target's stages know."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

TOKENS, STAGES = 3, 2
# After the first layer, which the first stage has, and after the last.
AUXILIARY = (1, len(layout.COMPRESS_RATIOS))
EAGLE = "vllm.v1.worker.gpu.spec_decode.eagle"


class Sublayer(torch.nn.Module):
    """In place of attention and experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: torch.Tensor | None) -> torch.Tensor:
        (x,) = (
            value
            for value in args
            if value is not None and value.dtype.is_floating_point
        )
        return x.tanh()


@contextmanager
def stage(rank: int, of: int) -> Iterator[None]:
    """Let vLLM find itself on one of `of` pipeline stages."""
    group = SimpleNamespace(
        world_size=of,
        rank_in_group=rank,
        is_first_rank=rank == 0,
        is_last_rank=rank == of - 1,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "vllm.distributed.parallel_state",
            "vllm.model_executor.models.utils",
            f"{EAGLE}.utils",
            layout.MODEL,
        ):
            patch.setattr(
                layout.module(name), "get_pp_group", lambda: group, raising=False
            )
        yield


def part(method: str | None, rank: int = 0, of: int = 1) -> Any:
    """The target's layers of one stage, their weights the same on every call."""
    config = model_configs.vllm_config(speculative_tokens=1)
    object.__setattr__(config.speculative_config, "method", method)
    if method is None:
        config.speculative_config = None
    model = layout.module(layout.MODEL)
    utilities = layout.module("vllm.utils.torch_utils")
    with (
        model_configs.current(config),
        utilities.set_default_torch_dtype(torch.bfloat16),
        pytest.MonkeyPatch.context() as patch,
        stage(rank, of),
    ):
        patch.setattr(model, "DeepseekV4XPUAttention", Sublayer)
        patch.setattr(model, "DeepseekV4MoE", Sublayer)
        made = model.DeepseekV4Model(vllm_config=config, prefix="model")
    for name, parameter in made.named_parameters():
        generator = torch.Generator().manual_seed(hash_of(name))
        values = torch.randn(parameter.shape, generator=generator) / 4
        parameter.data.copy_(values)
    for module in made.modules():
        if hasattr(module, "variance_epsilon"):
            module._forward_method = module.forward_native
    return made


def hash_of(name: str) -> int:
    return sum(index * value for index, value in enumerate(name.encode(), start=1))


def run(made: Any, rank: int, of: int, before: Any = None) -> Any:
    tokens = torch.arange(TOKENS, device=layout.device())
    with stage(rank, of):
        made._set_aux_hidden_state_layers(AUXILIARY)
        return made(tokens, tokens, before)


def test_auxiliary_states_cross_the_stages() -> None:
    states, auxiliary = run(part("dspark"), 0, 1)
    sent = run(part("dspark", 0, STAGES), 0, STAGES)
    got_states, got = run(part("dspark", 1, STAGES), 1, STAGES, sent)
    assert torch.equal(got_states, states)
    assert len(got) == len(auxiliary), (
        f"{len(got)} of {len(auxiliary)} auxiliary hidden states reach the draft model"
    )
    assert all(map(torch.equal, got, auxiliary))


def test_a_layer_is_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's streams serve the draft model and the head."""
    made = part("dspark")
    kind = layout.module(layout.MODEL).DeepseekV4DecoderLayer
    merge, merged = kind.hc_post, []

    def counted(layer: Any, *args: torch.Tensor) -> torch.Tensor:
        merged.append(layer)
        result: torch.Tensor = merge(layer, *args)
        return result

    monkeypatch.setattr(kind, "hc_post", counted)
    run(made, 0, 1)
    assert len(merged) == len(AUXILIARY), (
        f"{len(AUXILIARY)} layers are merged {len(merged)} times"
    )


def test_the_target_says_that_it_sends_them() -> None:
    verify = layout.module(f"{EAGLE}.eagle3_utils")
    target = SimpleNamespace(model=part("dspark", 1, STAGES))
    verify.verify_supports_aux_hidden_states_over_pp(target, "dspark")


def test_the_last_stage_has_the_embedding() -> None:
    target = part("dspark", 1, STAGES)
    draft = SimpleNamespace(has_own_embed_tokens=False)
    inner = SimpleNamespace(embed_tokens=torch.nn.Embedding(2, 2))
    with stage(1, STAGES):
        layout.module(f"{EAGLE}.utils").maybe_share_target_embed(draft, inner, target)
    assert inner.embed_tokens is target.embed_tokens


@pytest.mark.unchanged
@pytest.mark.parametrize("method", [None, "mtp"])
def test_other_last_stages_have_no_embedding(method: str | None) -> None:
    target = part(method, 1, STAGES)
    missing = layout.module("vllm.model_executor.models.utils").PPMissingLayer
    assert isinstance(target.embed_tokens, missing)
    sent = run(part(method, 0, STAGES), 0, STAGES)
    assert sent["hidden_states"].shape == (TOKENS, 4, 256)
