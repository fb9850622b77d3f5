# SPDX-License-Identifier: Apache-2.0
"""If the user asks for it, a layer computes its inputs on overlapping streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers
from helpers.decode_layer import DecodeLayer
from vllm import envs

NAME = "VLLM_XPU_DSV4_OVERLAP_STREAMS"
DEFAULT = "the default stream"


class Sublayer(torch.nn.Module):
    """In place of attention and experts; keeps the streams that it is given."""

    def __init__(self, *args: Any, aux_stream_list: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.aux_stream_list = aux_stream_list


def streams_of_layers(monkeypatch: pytest.MonkeyPatch, draft: bool) -> list[Any]:
    """The streams that each layer of the model, or of the draft, is built with."""
    model = layout.module(layout.MODEL)
    monkeypatch.setattr(model, model_layers.attention_class().__name__, Sublayer)
    monkeypatch.setattr(model, "DeepseekV4MoE", Sublayer)
    config = model_configs.vllm_config(speculative_tokens=int(draft))
    if draft:
        built = model_layers.draft_model(config)
    else:
        with model_configs.current(config), layout.worker():
            built = model.DeepseekV4Model(vllm_config=config, prefix="model")
    found = [
        layer.attn.aux_stream_list
        for layer in built.modules()
        if isinstance(layer, model.DeepseekV4DecoderLayer)
    ]
    assert found
    return found


@pytest.mark.unchanged
@pytest.mark.parametrize("draft", [False, True])
def test_one_stream_by_default(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert all(found is None for found in streams_of_layers(monkeypatch, draft))


@pytest.mark.parametrize("draft", [False, True])
def test_three_streams_for_all_layers(
    draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "1")
    first, *others = streams_of_layers(monkeypatch, draft)
    assert first is not None, f"{NAME} has no effect"
    assert len({id(stream) for stream in first}) == 3
    assert all(found is first for found in others)


def test_compiled_graphs_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    off = envs.compile_factors()[NAME]
    monkeypatch.setenv(NAME, "1")
    assert envs.compile_factors()[NAME] != off


class Entered:
    """The streams that a layer works on, and those on which it asks for workspace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = DEFAULT
        self.streams: list[Any] = []
        self.with_workspace: set[Any] = set()
        monkeypatch.setattr(torch.xpu, "stream", self.stream)
        manager = layout.module("vllm.v1.worker.workspace").WorkspaceManager
        lend = manager.get_simultaneous

        def get_simultaneous(owner: Any, *shapes: Any) -> Any:
            self.with_workspace.add(self.current)
            return lend(owner, *shapes)

        monkeypatch.setattr(manager, "get_simultaneous", get_simultaneous)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        self.streams.append(stream)
        yield
        self.current = before


@pytest.mark.unchanged
@pytest.mark.parametrize(("ratio", "count"), [(0, 0), (4, 3), (128, 1)])
def test_a_layer_gives_the_same(
    ratio: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch only passes streams to the layer; the layer itself is upstream's."""
    layer = DecodeLayer(ratio, (601, 131))
    part = layer.part
    if part.indexer is not None:
        layer.take_indexer()
    with layer.batch.ready():
        alone = layer.run().clone()
        streams = [torch.xpu.Stream() for _ in range(3)]
        part.aux_stream_list = streams
        if part.indexer is not None:
            part.indexer.aux_stream = streams[2]
        layer.out.fill_(torch.nan)
        entered = Entered(monkeypatch)
        overlapped = layer.run()
    assert torch.equal(overlapped, alone)
    assert len(set(map(id, entered.streams))) >= count, entered.streams
    assert len(entered.with_workspace) <= 1, "two streams share the workspace"
