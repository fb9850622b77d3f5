# SPDX-License-Identifier: Apache-2.0
"""What captured graphs write is compared as well: to the caches, and to memory of
others."""

import pytest
import torch
from helpers import layout
from helpers.captured_graphs import (
    STATE,
    Plant,
    host_value,
    make,
    moved_index,
    moved_scratch,
    other_state,
    small_number,
    stale_pointer,
    start,
)
from helpers.graph_verdicts import CHECK, NO_CASE, other_rank


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "plant, layers",
    [
        (stale_pointer, "after model.layers.1.attn, up to model.layers.2"),
        (host_value, "after model.layers.0.attn, up to model.layers.1"),
        (small_number, "up to model.layers.1"),
        (moved_index, "up to model.layers.2"),
    ],
)
def test_the_first_layer_that_differs_is_named(
    version: int,
    plant: Plant,
    layers: str,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(version, plant, monkeypatch)
    assert start(runner) == 1
    assert not runner.has_graphs()
    assert layers in said.text, "no layer is named"


@pytest.mark.parametrize("version", [1, 2])
def test_a_graph_whose_caches_alone_differ_is_dropped(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps read them."""
    runner = make(version, other_state, monkeypatch)
    assert start(runner) == 1
    assert not runner.has_graphs(), "the graph that differs is still there"
    assert "off by 0 of its norm" in said.text and f"up to {STATE}" in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_caches_that_agree_are_said(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    assert start(runner) == 1
    assert runner.has_graphs()
    assert "the caches of 6 batches are the same" in said.text, "no cache was compared"


@pytest.mark.parametrize("version", [1, 2])
def test_no_mode_serves_from_memory_that_replays_wrote_to(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, moved_scratch, monkeypatch)
    with pytest.raises(RuntimeError, match="Start with --enforce-eager") as raised:
        start(runner)
    assert "first after the input, up to model.layers.0" in str(raised.value)


@pytest.mark.parametrize("version", [1, 2])
def test_every_rank_ends_where_one_has_damaged_memory(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=NO_CASE, same=0)
    reason = "Eager mode for the FULL .*Start with --enforce-eager"
    with pytest.raises(RuntimeError, match=reason):
        start(runner)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_every_byte_of_a_page_counts(dtype: torch.dtype) -> None:
    digests = layout.module(f"{CHECK}_writes").page_digests
    pages = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    expected = digests(pages.view(dtype))
    for place in (0, 17, 63):
        other = pages.clone()
        other[1, place] += 1
        assert (digests(other.view(dtype)) != expected).tolist() == [False, True, False]
    swapped = pages.flip(1).contiguous()
    assert not (digests(swapped.view(dtype)) == expected).any()
