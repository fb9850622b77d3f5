# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of drafts are compared with eager execution at start, for the second
runner."""

import logging
from typing import Any

import pytest
import torch
from helpers import draft_graphs, layout
from helpers.captured_graphs import LONGEST, STATE, Plant, make, start
from helpers.graph_verdicts import CHECK, other_rank

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
    # The first request's drafts begin a page.
    runner.max_model_len = LONGEST - 13
    assert start(runner) == 1
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
    assert start(runner) == 1
    for manager in managers_of(runner.speculator):
        sizes = {desc.num_reqs for desc in manager.graphs}
        assert sizes <= set(manager.replayed), "no graph was compared"
        assert manager._graphs_captured
    assert runner.speculator.rejected == {*range(draft_graphs.STEPS + 1)}
    assert len(runner.speculator.sampled) > 2, "one token is drafted behind"
    assert runner.has_graphs()
    assert "are the same by captured graphs" in said.text
    assert not any(r.levelno >= logging.WARNING for r in said.records)


def test_graphs_of_drafts_that_differ_on_another_rank_are_dropped_here_too(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(2, None, monkeypatch, draft_graphs.OneByOne)
    other_rank(monkeypatch, first=6)
    assert start(runner) == 1
    managers = [runner.cudagraph_manager, *managers_of(runner.speculator)]
    assert not any(m.graphs for m in managers), "this rank went by its own verdict"
    assert f"graph of drafts for {draft_graphs.MOST} requests differs" in said.text


def test_rows_behind_other_draft_tokens_are_not_compared() -> None:
    """They are only if all requests have others."""
    drafts = layout.module(f"{CHECK}_drafts").Drafts
    tokens, rows = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 3)
    expected = drafts(tokens, rows)
    other = drafts(torch.tensor([[1, 2], [3, 5]]), rows + torch.tensor([[0], [9]]))
    assert other.error(expected) == 0.0
    assert drafts(tokens + 1, rows).error(expected) == float("inf")
    further = drafts(tokens, rows * 1.5)
    assert further.error(expected) == 0.5
    outcome = layout.module(f"{CHECK}_steps").Outcome(rows, None, drafts=expected)
    assert outcome._replace(drafts=further).error(outcome) == 0.5
