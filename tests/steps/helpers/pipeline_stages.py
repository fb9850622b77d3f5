# SPDX-License-Identifier: Apache-2.0
"""The target's layers of one pipeline stage, for what a draft model reads of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import layout, model_configs, model_layers

TOKENS = 3
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
    """Make vLLM believe that it runs one of `of` pipeline stages."""
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
            layout.MTP,
        ):
            patch.setattr(
                layout.module(name), "get_pp_group", lambda: group, raising=False
            )
        yield


def stage_of_model(method: str | None, rank: int = 0, of: int = 1) -> Any:
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
        patch.setattr(model, model_layers.attention_class().__name__, Sublayer)
        patch.setattr(model, "DeepseekV4MoE", Sublayer)
        made = model.DeepseekV4Model(vllm_config=config, prefix="model")
    made.do_not_compile = True  # where the release compiles the model
    for name, parameter in made.named_parameters():
        generator = torch.Generator().manual_seed(_seed(name))
        values = torch.randn(parameter.shape, generator=generator) / 4
        parameter.data.copy_(values)
    for module in made.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = module.forward_native
    return made


def _seed(name: str) -> int:
    return sum(index * value for index, value in enumerate(name.encode(), start=1))


def run(
    made: Any,
    rank: int,
    of: int,
    before: Any = None,
    auxiliary: Sequence[int] = AUXILIARY,
) -> Any:
    """The output of a stage, sent to the next stage or returned by the last: the hidden
    states and `auxiliary`."""
    tokens = torch.arange(TOKENS, device=layout.device())
    with stage(rank, of):
        owner = layout.module(layout.MODEL).DeepseekV4ForCausalLM
        owner.set_aux_hidden_state_layers(SimpleNamespace(model=made), tuple(auxiliary))
        return made(tokens, tokens, before)
