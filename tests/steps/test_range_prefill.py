# SPDX-License-Identifier: Apache-2.0
"""Where no indexer chooses, prefill reads ranges of keys, and writes no indices."""

from typing import Any

import pytest
from helpers import attention_batch, kernel_trace, layout
from helpers import reference_attention as reference
from helpers.attention_batch import Batch, random_sinks
from helpers.compilations import check, compiled, warmed_up
from test_jit_warmup import registered

TOLERANCE = 4e-3
RANGES = "_range_prefill_kernel"
BY_INDEX = {
    "_dim_lanes_prefill_kernel",
    "_dim_lanes_16_prefill_kernel",
    "_prefill_kernel",
}


def launches(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, set[str]]:
    """The output of a step, and the kernels that prefill launches in it."""
    with batch.ready() as run, kernel_trace.traced(monkeypatch) as trace:
        output = run()
    return output, set(trace.launches) & {RANGES, *BY_INDEX}


@pytest.mark.parametrize(("ratio", "heads"), [(0, 16), (128, 8)])
def test_queries_share_the_keys_of_their_ranges(
    ratio: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks of a prompt and whole prompts beside a decode, some as short as a part
    of a tile; equal to the form with indices."""
    sinks = random_sinks(heads)
    lens = ((131, 260, 9, 129, 4, 300), (1, 5, 9, 3, 2, 2))
    batch = Batch(ratio, *lens, sinks=sinks)
    output, names = launches(batch, monkeypatch)
    assert names == {RANGES}, f"prefill reads ranges by {names}"
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE

    module = layout.prefill_module(batch.layer)
    monkeypatch.setattr(module, "takes_ranges", lambda *_: False)
    by_index, names = launches(batch, monkeypatch)
    assert names and names <= BY_INDEX
    assert reference.relative(output, by_index.double().cpu()) < TOLERANCE


def test_requests_of_every_chunk_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the reserved memory does not hold at once, behind two decodes."""
    sinks = random_sinks(8)
    batch = Batch(0, (131, 9, *(140,) * 6), (1, 1, *(2,) * 6), sinks=sinks)
    monkeypatch.setattr(batch.layer, "PREFILL_CHUNK_SIZE", 1)
    with batch.ready() as run, kernel_trace.traced(monkeypatch) as trace:
        output = run()
    chunks = trace.launches.count(RANGES)
    assert chunks > 1, f"prefill reads ranges by {chunks} launches for several chunks"
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE


@pytest.mark.unchanged
def test_a_prompt_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up has the kernel that computes it."""
    registries: list[Any] = []
    sinks, build = random_sinks(8), registered(registries)
    batch = Batch(0, (9, 7), (2, 4), sinks=sinks, build=build)
    before = warmed_up(registries[0], monkeypatch)
    with batch.ready() as run, compiled(monkeypatch) as needed:
        run()
    check(needed, before)


@pytest.mark.unchanged
@pytest.mark.parametrize("heads", [8, 32])
def test_chosen_entries_and_many_heads_keep_their_indices(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = random_sinks(heads)
    batch = Batch(4 if heads == 8 else 128, (260, 9), (2, 2), sinks=sinks)
    output, names = launches(batch, monkeypatch)
    assert names and names <= BY_INDEX
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE


@pytest.mark.unchanged
def test_images_keep_their_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of an image sees the whole image, which is no window."""
    sinks = random_sinks()
    images = {0: [(140, 163)]}
    batch = Batch(128, (170,), (35,), sinks=sinks, images=images)
    output, names = launches(batch, monkeypatch)
    assert names and names <= BY_INDEX
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE


@pytest.mark.unchanged
def test_queries_with_gaps_keep_their_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = random_sinks()
    batch = Batch(0, (9,), (3,), sinks=sinks)
    batch.queries = attention_batch.far_apart(batch.queries, 2**13)
    output, names = launches(batch, monkeypatch)
    assert names and names <= BY_INDEX
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE
