# SPDX-License-Identifier: Apache-2.0
"""Which graphs the check at start compares, with which requests, and which not."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import draft_graphs, layout
from helpers.captured_graphs import (
    BLOCK,
    BLOCKS,
    LONGEST,
    PIECES,
    SIZES,
    descriptor,
    make,
    stale_pointer,
    start,
)
from helpers.graph_verdicts import CHECK
from vllm.config import CUDAGraphMode
from vllm.sequence import IntermediateTensors

every_runner = pytest.mark.parametrize("version", [1, 2])
TRANSFER, POOLING = "KV connectors", "pooling models"


def recurrent(runner: Any) -> None:
    runner.model_config.hf_text_config.model_type = "qwen3_next"


def only_images(runner: Any) -> None:
    runner.vllm_config.is_mm_encoder_only = True


def transfers(runner: Any) -> None:
    runner.vllm_config.kv_transfer_config = SimpleNamespace()


def pools(runner: Any) -> None:
    runner.model_config.runner_type = "pooling"


@every_runner
@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param(recurrent, "", marks=pytest.mark.unchanged),
        pytest.param(only_images, "", marks=pytest.mark.unchanged),
        (transfers, TRANSFER),
        (pools, POOLING),
    ],
)
def test_what_is_not_compared(
    version: int,
    change: Any,
    word: str,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a recurrent model a step cannot run again."""
    runner = make(version, None, monkeypatch)
    change(runner)
    assert start(runner) == 1
    assert runner.has_graphs() and runner.steps == 0
    assert word in said.text and ("not compared" in said.text) == bool(word)


@every_runner
def test_graphs_in_pieces_are_compared(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a prompt that fills it; those beyond the model's length by none."""
    runner = make(version, None, monkeypatch)
    runner.take_pieces(*PIECES, LONGEST)
    start(runner)
    assert "8 batches are the same" in said.text, "a graph in pieces was not compared"
    assert runner.replays == 2 * len(SIZES) + len(PIECES)
    assert not any(r.levelno >= logging.WARNING for r in said.records)


@every_runner
def test_a_graph_in_pieces_that_differs_is_named(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    runner.take_pieces(*PIECES)
    capture = runner.capture_model

    def captured() -> int:
        done: int = capture()
        state = runner.captured[PIECES[1]]
        runner.captured[PIECES[1]] = state._replace(scale=1.5)
        return done

    runner.capture_model = captured
    start(runner)
    assert not runner.has_graphs(), "the graph that differs is still there"
    assert f"PIECEWISE graph of {PIECES[1]} tokens (a prompt) differs" in said.text


def capture_for(runner: Any, *descs: Any) -> None:
    """Full graphs of these sizes alone."""
    found = [(CUDAGraphMode.FULL, [*descs])]
    runner.cudagraph_dispatcher.get_capture_descs = lambda: found


def built(runner: Any) -> tuple[list[Any], list[Any]]:
    """The requests of the check, and its cases."""
    drafts = layout.module(f"{CHECK}_drafts").DraftGraphs(runner)
    requests, cases = layout.module(f"{CHECK}_cases").Cases(runner, drafts).build()
    return requests, cases


def test_a_graph_of_uneven_requests_is_left_out(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of as many tokens of each request comes to it."""
    runner = make(1, None, monkeypatch)
    uneven = SimpleNamespace(num_tokens=5, num_reqs=2)
    capture_for(runner, uneven, *map(descriptor, SIZES))
    start(runner)
    assert "6 batches are the same" in said.text
    assert not any(r.levelno >= logging.WARNING for r in said.records)


@every_runner
def test_too_few_blocks(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest request takes 33, the second 2; the null block is nobody's."""
    runner = make(version, None, monkeypatch)
    runner.take_pieces(*PIECES)
    shrink(runner, 36)
    start(runner)
    assert "Too few blocks to check 4 requests" in said.text
    assert "4 batches are the same" in said.text


def test_no_blocks(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(1, None, monkeypatch)
    shrink(runner, 16)
    start(runner)
    assert "Too few blocks to check 1 requests" in said.text
    assert runner.has_graphs() and runner.steps == 0


def shrink(runner: Any, blocks: int) -> None:
    """The first of the runner's blocks alone."""
    runner.kv_cache_config.num_blocks = blocks
    layers = runner.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        layer.kv_cache = layer.kv_cache[:blocks]


@pytest.mark.parametrize(
    "described",
    [{"compress_ratios": [0, 4, 128]}, {"compress_rates": {"c4a": 4, "c128a": 128}}],
    ids=list,
)
def test_requests_of_the_check(
    described: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is half as long again as what indexers give whole. Contexts differ,
    come to each place of an entry, and end pages and compressed entries."""
    runner = make(1, None, monkeypatch)
    runner.max_model_len, runner.kv_cache_config.num_blocks = 4096, 1024
    runner.model_config.hf_text_config = SimpleNamespace(index_topk=512, **described)
    capture_for(runner, descriptor(17))
    requests, _ = built(runner)
    lengths = [request.num_computed_tokens for request in requests]
    assert lengths[0] == 512 * 4 * 3 / 2 - 1
    assert len(set(lengths)) == len(lengths) == 17
    assert {length % 4 for length in lengths[1:]} == {0, 1, 2, 3}
    for entry in (128, 256):
        assert any((length + 1) % (2 * entry) == entry for length in lengths[1:])
    blocks = [block for r in requests for group in r.block_ids for block in group]
    assert len(set(blocks)) == len(blocks) and min(blocks) > 0
    for request in requests:
        tokens = len(request.prompt_token_ids) + 1
        assert len(request.block_ids[0]) == -(-tokens // BLOCK)


def test_a_context_leaves_room_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(1, None, monkeypatch)
    capture_for(runner, SimpleNamespace(num_tokens=3, num_reqs=1))
    ((request,), _) = built(runner)
    assert request.num_computed_tokens + 3 + 1 == LONGEST


@every_runner
def test_a_step_that_comes_to_no_graph_is_said(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    plan = runner.plan

    def eager(tokens: int, longest: int) -> tuple[bool, int, int]:
        if tokens == SIZES[-1]:
            return False, tokens, longest
        planned: tuple[bool, int, int] = plan(tokens, longest)
        return planned

    runner.plan = eager
    start(runner)
    missed = f"FULL graph of {SIZES[-1]} tokens (as many requests): not checked"
    assert f"No batch came to the {missed}" in said.text
    assert "5 batches are the same" in said.text


def test_a_graph_of_drafts_that_no_step_came_to_is_said(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests find no blocks; those of contexts are not compared."""
    runner = make(2, None, monkeypatch, draft_graphs.AllAtOnce)
    manager = runner.speculator.query_cudagraph_manager
    manager._capture_descs[CUDAGraphMode.FULL].append(descriptor(BLOCKS))
    shrink(runner, 36)
    start(runner)
    graph = "graph of query_cudagraph_manager of"
    missed = ", ".join(f"{graph} {size} tokens" for size in (6, 8, BLOCKS))
    assert f"No batch came to the {missed}: not checked" in said.text


def test_graphs_of_drafts_alone(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are compared after eager steps where the model has no graphs."""
    runner = make(2, None, monkeypatch, draft_graphs.AllAtOnce)
    runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL] = []
    start(runner)
    assert "Drafts of 3 batches are among them" in said.text
    assert runner.speculator.rejected == {*range(draft_graphs.STEPS + 1)}
    assert runner.speculator.query_cudagraph_manager.replayed == [1, 3, 4]
    assert not any(r.levelno >= logging.WARNING for r in said.records)


def test_without_full_graphs_no_request_is_needed(monkeypatch: Any) -> None:
    runner = make(1, None, monkeypatch)
    capture_for(runner)
    assert built(runner) == ([], [])


def test_cases_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each of their sizes, of as many tokens as drafts and one, by the smallest
    graph of the model that has room; prompts leave room for drafts."""
    runner = make(2, None, monkeypatch, draft_graphs.AllAtOnce)
    runner.take_pieces(8, 48, LONGEST - 2)
    left = draft_graphs.DraftManager((5,), draft_graphs.STEPS + 1)
    left._graphs_captured = False
    runner.speculator.prefill_cudagraph_manager = left
    sizes = ((3, 1), (4, 4), (12, 12))
    runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL] = [
        SimpleNamespace(num_tokens=tokens, num_reqs=count) for tokens, count in sizes
    ]
    _, cases = built(runner)
    full = [case for case in cases if case.mode == CUDAGraphMode.FULL]
    drafted = [case for case in full if case.drafts]
    assert [(len(it.requests), it.graph_tokens) for it in drafted] == [
        (1, 3),
        (3, 12),
        (4, 12),
    ]
    assert {it.num_new_tokens for it in drafted} == {draft_graphs.STEPS + 1}
    prompts = [case for case in cases if case not in full]
    assert [it.graph_tokens for it in prompts] == [8, 48]
    (prompt,) = prompts[0].requests
    assert len(prompt.block_ids[0]) * BLOCK >= 48 + draft_graphs.STEPS


class Stage:
    """A stage between others: its step takes tensors and gives tensors, with rows
    behind those of the step."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.compute = runner, runner.execute_model
        self.taken: dict[int, torch.Tensor] = {}
        runner.intermediate_tensors = IntermediateTensors(
            {"x": torch.empty(1, 2, 3, dtype=torch.bfloat16), "y": torch.empty(1, 5)}
        )

    def __call__(self, output: Any, received: Any) -> IntermediateTensors | None:
        self.compute(output)
        state = self.runner.execute_model_state
        self.runner.execute_model_state = None
        if state is None:
            return None
        x, y = received["x"], received["y"]
        rows = state.hidden_states
        assert len(x) == len(y) >= state.input_batch.padded >= len(rows)
        assert (x.dtype, x.shape[1:], y.shape[1:]) == (torch.bfloat16, (2, 3), (5,))
        # The same on all ranks, and in both modes.
        torch.testing.assert_close(self.taken.setdefault(len(x), x), x)
        assert x.unique().numel() > 1
        more = torch.full((2, rows.shape[1]), torch.nan)
        whole = torch.cat((rows, more))
        return IntermediateTensors(
            {"x": whole[:, :6].view(-1, 2, 3), "y": whole[:, 6:]}
        )


@every_runner
@pytest.mark.parametrize("plant", [None, stale_pointer])
def test_a_stage_between_others(
    version: int, plant: Any, said: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    runner = make(version, plant, monkeypatch)
    runner.execute_model = Stage(runner)
    first = SimpleNamespace(is_first_rank=False)
    monkeypatch.setattr(layout.module(f"{CHECK}_steps"), "get_pp_group", lambda: first)
    start(runner)
    assert runner.has_graphs() == (plant is None), said.text
    wanted = "6 batches are the same" if plant is None else "graph of 1 tokens"
    assert wanted in said.text


@every_runner
def test_graphs_that_are_dropped_are_freed(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in pieces as well, and their memory."""
    twins, freed = layout.module(f"{CHECK}_twins"), []
    places = [(twins.BreakableCUDAGraphWrapper, "clear_all_graphs")]
    places += [(twins.CUDAGraphWrapper, "clear_all_graphs")] * (version == 1)
    places += [(torch.accelerator, "empty_cache")]
    for place, name in places:
        monkeypatch.setattr(place, name, lambda place=place: freed.append(place))
    runner = make(version, stale_pointer, monkeypatch)
    start(runner)
    assert set(freed) == {place for place, _ in places}
    if version == 2:
        assert not runner.cudagraph_manager.graphs
