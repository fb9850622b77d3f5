# SPDX-License-Identifier: Apache-2.0
"""A server that is sent a whole prompt computes its last token again, and needs that
token's windows: it keeps them, and so does the server that sends."""

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from helpers import cache_groups, layout

pytestmark = pytest.mark.any_platform

LENGTHS = range(1, 601)


def skipped_blocks(cache: Any, length: int, loaded: int) -> dict[str, int]:
    """How many blocks each window is without, once a connector may load `loaded` of
    `length` tokens."""
    asked = cache_groups.request(length)
    cache.allocate_slots(
        asked, 0, num_external_computed_tokens=loaded, delay_cache_blocks=True
    )
    _, *windows = cache.get_blocks(asked.request_id).blocks
    found = {
        name: sum(block.is_null for block in blocks)
        for name, blocks in zip(cache_groups.WINDOWS, windows, strict=True)
    }
    cache.free(asked)
    return found


def outside_the_windows(token: int) -> dict[str, int]:
    """How many blocks lie outside the windows of a token."""
    return {
        name: max(0, token + 1 - window) // block_size
        for name, (block_size, window) in cache_groups.WINDOWS.items()
    }


def test_a_prompt_that_is_loaded_whole() -> None:
    cache = cache_groups.manager()
    found = [
        length
        for length in LENGTHS
        if skipped_blocks(cache, length, length) != outside_the_windows(length - 1)
    ]
    assert not found, f"the windows of the last token are cut off at lengths {found}"


@pytest.mark.unchanged
@pytest.mark.parametrize("rest", [1, 2, 64])
def test_a_prompt_that_is_loaded_in_part(rest: int) -> None:
    """Its next token is the first that is not loaded, and no block more is kept."""
    cache = cache_groups.manager()
    for loaded in LENGTHS:
        found = skipped_blocks(cache, loaded + rest, loaded)
        assert found == outside_the_windows(loaded), loaded


@pytest.mark.unchanged
@pytest.mark.parametrize("length", [63, 64, 191, 192, 255, 256, 257])
def test_a_cache_that_is_too_small_is_noticed(length: int) -> None:
    """No block is asked of an empty pool: the estimate is what is taken, and the null
    block is beside it."""
    fits = []
    for blocks in range(2, 40):
        cache = cache_groups.manager(blocks)
        asked = cache_groups.request(length)
        made = cache.allocate_slots(
            asked,
            0,
            num_external_computed_tokens=length,
            delay_cache_blocks=True,
        )
        fits.append(made is not None)
    assert fits == sorted(fits)
    groups = cache.get_blocks(asked.request_id).blocks
    taken = sum(not block.is_null for group in groups for block in group)
    assert fits.index(True) + 2 == taken + 1


@functools.cache
def sender() -> Any:
    """A connector that is told what it may send; it takes a while to make."""
    sends = layout.module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    connector = create_autospec(sends.SupportsHMA, instance=True)
    connector.request_finished_all_groups.return_value = False, None
    return connector


def blocks_that_are_sent(
    cache: Any, length: int, chunk: int, in_flight: int = 0
) -> list[list[int]]:
    """The blocks of each group that a connector may send of a prompt of `length`
    tokens, computed in chunks of `chunk`, once its first new token is there, and of
    the last step so many are in flight."""
    asked = cache_groups.request(length, do_remote_decode=True)
    while (start := asked.num_computed_tokens) < length:
        tokens = min(chunk, length - start)
        assert cache.allocate_slots(asked, tokens) is not None
        asked.num_computed_tokens += tokens
    asked.append_output_token_ids(1)
    asked.num_in_flight_tokens = in_flight
    connector = sender()
    scheduler = SimpleNamespace(
        connector=connector,
        kv_cache_manager=cache,
        vllm_config=SimpleNamespace(kv_transfer_config=None),
    )
    module = layout.module("vllm.v1.core.sched.scheduler")
    module.Scheduler._connector_finished(scheduler, asked)
    ((_, ids), _) = connector.request_finished_all_groups.call_args
    cache.free(asked)
    return list(ids)


@pytest.mark.parametrize("chunk", [600, 100])
def test_a_prompt_that_is_sent_whole(chunk: int) -> None:
    """Its sender keeps what its receiver lays out, and no block more."""
    cache = cache_groups.manager()
    found = []
    for length in LENGTHS:
        _, *windows = blocks_that_are_sent(cache, length, chunk)
        given_up = {
            name: ids.count(0)
            for name, ids in zip(cache_groups.WINDOWS, windows, strict=True)
        }
        if given_up != outside_the_windows(length - 1):
            found.append(length)
    assert not found, f"the windows of the last token are cut off at lengths {found}"


@pytest.mark.unchanged
def test_a_step_in_flight_keeps_its_windows() -> None:
    """Its tokens still read them where a request is aborted."""
    cache = cache_groups.manager()
    for length in LENGTHS:
        tokens = min(length, 90)
        _, *windows = blocks_that_are_sent(cache, length, 600, tokens)
        given_up = {
            name: ids.count(0)
            for name, ids in zip(cache_groups.WINDOWS, windows, strict=True)
        }
        assert given_up == outside_the_windows(length - tokens), length
