# SPDX-License-Identifier: Apache-2.0
"""Captured graphs, those of drafts as well, are compared with eager execution at start,
for either runner."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import draft_graphs, layout, model_configs
from helpers.captured_graphs import (
    BLOCK,
    BLOCKS,
    SIZES,
    STATE,
    Plant,
    host_value,
    make,
    moved_index,
    moved_scratch,
    other_state,
    small_number,
    stale_pointer,
)
from vllm.config import VllmConfig

LOGGER = "vllm.v1.worker.xpu_graph_check"
STEPS = f"{LOGGER}_steps"
NO_CASE = 1 << 30
"""A rank's word that no case differs."""


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What the check logs, in a world of one rank."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    with model_configs.current(VllmConfig()):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "plant, words",
    [
        (
            stale_pointer,
            "graph of 1 tokens|after model.layers.1.attn, up to model.layers.2",
        ),
        (
            host_value,
            "graph of 1 tokens|after model.layers.0.attn, up to model.layers.1",
        ),
        (small_number, "graph of 1 tokens|up to model.layers.1"),
        (moved_index, "graph of 1 tokens|up to model.layers.2"),
        (other_state, f"graph of 1 tokens|off by 0 of its norm|up to {STATE}"),
    ],
)
def test_a_graph_that_differs_is_named_and_dropped(
    version: int,
    plant: Plant,
    words: str,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(version, plant, monkeypatch)
    assert runner.capture_model() == 1
    assert not runner.has_graphs(), "the graph that differs is still there"
    for part in words.split("|"):
        assert part in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_graphs_that_agree_stay(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    assert runner.capture_model() == 1
    assert runner.replays == 2 * len(SIZES), "no graph was compared"
    assert runner.has_graphs()
    assert "6 batches are the same" in said.text
    assert not any(r.levelno >= logging.WARNING for r in said.records)


@pytest.mark.parametrize("version", [1, 2])
def test_the_start_ends_if_it_must(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "stop")
    runner = make(version, stale_pointer, monkeypatch)
    with pytest.raises(RuntimeError, match=r"graph of 1 tokens .* differs"):
        runner.capture_model()


@pytest.mark.parametrize("version", [1, 2])
def test_no_mode_serves_from_memory_that_replays_wrote_to(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, moved_scratch, monkeypatch)
    with pytest.raises(RuntimeError, match="Start with --enforce-eager") as raised:
        runner.capture_model()
    assert "first after the input, up to model.layers.0" in str(raised.value)


def other_rank(patch: pytest.MonkeyPatch, first: int, same: int) -> None:
    """A second rank, whose first case that differs is `first`, and whose eager step
    after the replays is the one before them (`same`) or not."""
    verdicts = iter([first, same])

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.clamp_(max=next(verdicts))

    patch.setattr(torch.distributed, "all_reduce", all_reduce)


@pytest.mark.parametrize("version", [1, 2])
def test_a_graph_that_differs_on_another_rank_is_dropped_here_too(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of which one replays and one does not would wait for each other."""
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=2, same=1)
    assert runner.capture_model() == 1
    assert not runner.has_graphs(), "this rank went by its own verdict"
    assert "graph of 2 tokens" in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_every_rank_ends_where_one_has_damaged_memory(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=NO_CASE, same=0)
    with pytest.raises(RuntimeError, match="Start with --enforce-eager"):
        runner.capture_model()


KINDS = draft_graphs.OneByOne, draft_graphs.AllAtOnce


def managers_of(speculator: Any) -> list[Any]:
    """Those of a speculator's graphs."""
    values = vars(speculator).values()
    return [v for v in values if isinstance(v, draft_graphs.DraftManager)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plant, words",
    [
        (draft_graphs.moved_weight, f"after {STATE}, up to {draft_graphs.LAYER}"),
        (draft_graphs.moved_head, "up to the tokens of drafts"),
    ],
)
def test_a_graph_of_drafts_that_differs_is_named_and_dropped(
    kind: Any,
    plant: Plant,
    words: str,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model verifies drafts, so that its own steps are right."""
    runner = make(2, plant, monkeypatch, kind)
    assert runner.capture_model() == 1
    managers = [runner.cudagraph_manager, *managers_of(runner.speculator)]
    for manager in managers:
        assert not manager.graphs, "the graph that differs is still there"
        assert not manager._graphs_captured
    assert "FULL graph of 3 tokens" in said.text and words in said.text


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_drafts_that_agree_stay(
    kind: Any, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size is replayed once, by as many requests as it has, also where the
    model's graphs are of other numbers of requests."""
    runner = make(2, None, monkeypatch, kind)
    assert runner.capture_model() == 1
    for manager in managers_of(runner.speculator):
        sizes = {desc.num_reqs for desc in manager.graphs}
        assert sizes <= set(manager.replayed), "no graph was compared"
        assert manager._graphs_captured
    assert runner.speculator.rejected == {*range(draft_graphs.STEPS + 1)}
    assert runner.has_graphs()
    assert "are the same by captured graphs" in said.text
    assert not any(r.levelno >= logging.WARNING for r in said.records)


def test_graphs_of_drafts_that_differ_on_another_rank_are_dropped_here_too(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(2, None, monkeypatch, draft_graphs.OneByOne)
    other_rank(monkeypatch, first=6, same=1)
    assert runner.capture_model() == 1
    managers = [runner.cudagraph_manager, *managers_of(runner.speculator)]
    assert not any(m.graphs for m in managers), "this rank went by its own verdict"
    assert f"graph of drafts for {draft_graphs.MOST} requests differs" in said.text


def test_rows_behind_other_draft_tokens_are_not_compared() -> None:
    """They are only if all requests have others."""
    drafts = layout.module(STEPS).Drafts
    tokens, rows = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 3)
    expected = drafts(tokens, rows)
    other = drafts(torch.tensor([[1, 2], [3, 5]]), rows + torch.tensor([[0], [9]]))
    assert other.error(expected) == 0.0
    assert drafts(tokens + 1, rows).error(expected) == float("inf")
    assert drafts(tokens, rows * 1.5).error(expected) == 0.5


def outcome(rows: torch.Tensor) -> Any:
    return layout.module(STEPS).Outcome(rows, {}, None)


def test_rows_of_zeros_agree() -> None:
    rows = torch.zeros(2, 3)
    assert outcome(rows).error(outcome(rows)) == 0.0
    assert outcome(rows + 1).error(outcome(rows)) > 1e30
    assert outcome(rows * float("nan")).error(outcome(rows)) > 1e30


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_every_byte_of_a_page_counts(dtype: torch.dtype) -> None:
    digests = layout.module(STEPS).page_digests
    pages = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    expected = digests(pages.view(dtype))
    for place in (0, 17, 63):
        other = pages.clone()
        other[1, place] += 1
        assert (digests(other.view(dtype)) != expected).tolist() == [False, True, False]
    swapped = pages.flip(1).contiguous()
    assert not (digests(swapped.view(dtype)) == expected).any()


@pytest.mark.parametrize("version", [1, 2])
def test_eager_steps_that_differ_from_themselves_are_said(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of some ops come in another order each time."""
    runner = make(version, None, monkeypatch)
    compute = runner.model_under_test.run
    noise = torch.Generator().manual_seed(0)

    def computed(*given: Any) -> torch.Tensor:
        rows: torch.Tensor = compute(*given)
        return rows + 1e-2 * torch.rand(rows.shape, generator=noise)

    runner.model_under_test.run = computed
    runner.capture_model()
    assert runner.has_graphs()
    assert "an eager step run again by 0.0" in said.text


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_nothing_runs_where_it_is_off(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "off")
    runner = make(version, stale_pointer, monkeypatch)
    assert runner.capture_model() == 1
    assert runner.has_graphs() and runner.steps == 0


class Recurrent(layout.module("vllm.model_executor.layers.mamba.abstract").MambaBase):  # type: ignore[misc]
    """A layer whose caches vLLM itself binds: a tuple of states."""

    def get_state_shape(self) -> Any:
        return ((4, 8), (2, 4, 4))

    def get_state_dtype(self) -> Any:
        return (torch.float32, torch.float32)

    @property
    def mamba_type(self) -> str:
        return "mamba2"


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_a_hybrid_model_starts(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention and recurrent layers, whose state each step moves on."""
    runner = make(version, None, monkeypatch)
    runner.model_config.hf_text_config = SimpleNamespace(model_type="qwen3_next")
    interface = layout.module("vllm.v1.kv_cache_interface")
    layer = Recurrent()
    spec = interface.MambaSpec(
        shapes=layer.get_state_shape(), dtypes=layer.get_state_dtype(), block_size=BLOCK
    )
    pages = torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)
    layer.bind_kv_cache(pages)
    name = "model.layers.1.linear_attn"
    runner.vllm_config.compilation_config.static_forward_context[name] = layer
    runner.vllm_config.cache_config = SimpleNamespace(mamba_cache_mode="none")
    runner.kv_cache_config.kv_cache_groups.append(
        SimpleNamespace(kv_cache_spec=spec, layer_names=[name])
    )
    assert runner.capture_model() == 1
    assert runner.has_graphs() and runner.steps == 0
