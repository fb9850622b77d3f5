# SPDX-License-Identifier: Apache-2.0
"""What a prompt's chunks write reaches the host's memory, from which NIXL sends it."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers import cache_groups, layout, model_configs

pytestmark = pytest.mark.any_platform

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
BLOCK_SIZES = (cache_groups.PAGE, *(size for size, _ in cache_groups.WINDOWS.values()))


def prefill_scheduler(config: Any) -> Any:
    """NIXL's scheduler of a server that sends pages from host memory."""
    vllm_config = model_configs.vllm_config()
    vllm_config.kv_transfer_config = layout.module("vllm.config").KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"
    )
    module = layout.module(f"{NIXL}.pull_scheduler")
    made = module.NixlPullConnectorScheduler(vllm_config, "engine", config)
    made.use_host_buffer = True  # As on a GPU; the CPU's own platform has no copies.
    return made


def step(asked: Any, tokens: int, *, blocks: Any, whole: bool, resumed: bool) -> Any:
    """What the scheduler gives to the connector: all blocks of the request where
    `whole`, else the new ones."""
    output = layout.module("vllm.v1.core.sched.output").SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {asked.request_id: tokens}
    ids = blocks.get_block_ids(allow_none=not whole)
    if whole and not resumed:
        output.scheduled_new_reqs = [
            SimpleNamespace(req_id=asked.request_id, block_ids=ids)
        ]
        return output
    cached = output.scheduled_cached_reqs
    cached.req_ids, cached.new_block_ids = [asked.request_id], [ids]
    cached.resumed_req_ids = {asked.request_id} if resumed else set()
    cached.num_computed_tokens, cached.num_output_tokens = [0], [0]
    return output


def stale_blocks(
    length: int, chunk: int, *, preempted_at: int = 0, drafts: int = 0
) -> list[int]:
    """The blocks that are sent of a prompt of `length` tokens, computed in chunks of
    `chunk`, though they were last saved before their last token was computed. Each step
    also has room for `drafts` tokens."""
    cache = cache_groups.manager()
    scheduler = prefill_scheduler(cache.kv_cache_config)
    asked = cache_groups.request(length, do_remote_decode=True)
    saved: dict[int, int] = {}
    whole = True
    while (start := asked.num_computed_tokens) < length:
        if start and start == preempted_at:
            preempted_at = 0
            cache.free(asked)
            start = asked.num_computed_tokens = 0
            whole = True
            # Other requests come in between and take the blocks.
            cache.allocate_slots(cache_groups.request(7), 7)
        tokens = min(chunk, length - start)
        new = cache.allocate_slots(asked, tokens, num_lookahead_tokens=drafts)
        held = cache.get_blocks(asked.request_id)
        if whole:
            scheduler.update_state_after_alloc(asked, held, 0)
        output = step(
            asked,
            tokens,
            blocks=held if whole else new,
            whole=whole,
            resumed=whole and bool(saved),
        )
        whole = False
        made = scheduler.build_connector_meta(output)
        asked.num_computed_tokens += tokens
        for meta in made.reqs_to_save.values():
            for ids in meta.local_block_ids:
                saved |= dict.fromkeys(ids, asked.num_computed_tokens)
    assert not scheduler._reqs_need_save
    held = cache.get_blocks(asked.request_id).get_block_ids()
    ends = {
        block: min(length, (index + 1) * size)
        for size, ids in zip(BLOCK_SIZES, held, strict=True)
        for index, block in enumerate(ids)
    }
    # The windows of the prompt's last token are sent.
    cache.remove_skipped_blocks(asked.request_id, length - 1)
    sent = scheduler.get_exchange_clipped_blocks(
        cache.get_block_ids_for_computed_tokens(asked.request_id, length)
    )
    return [
        block
        for ids in sent
        for block in ids
        if block and saved.get(block, 0) < ends[block]
    ]


@pytest.mark.parametrize(
    ("length", "chunk"), [(200, 120), (300, 100), (513, 200), (700, 1), (600, 599)]
)
def test_chunks_that_share_a_block(length: int, chunk: int) -> None:
    found = stale_blocks(length, chunk)
    assert not found, f"blocks {found} are not saved after the last chunk in them"


@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
def test_room_for_drafts(drafts: int) -> None:
    """Its blocks lie behind those that are sent."""
    found = [
        length for length in range(50, 70) if stale_blocks(length, 25, drafts=drafts)
    ]
    assert not found, f"blocks of lengths {found} are not saved after the last chunk"


def test_a_request_that_was_preempted() -> None:
    found = stale_blocks(700, 100, preempted_at=300)
    assert not found, f"blocks {found} are not saved after the last chunk in them"


@pytest.mark.unchanged
@pytest.mark.parametrize(("length", "chunk"), [(1, 512), (200, 512), (768, 256)])
def test_chunks_of_whole_blocks(length: int, chunk: int) -> None:
    assert not stale_blocks(length, chunk)


@pytest.mark.unchanged
def test_a_last_chunk_behind_another_that_is_none() -> None:
    cache = cache_groups.manager()
    scheduler = prefill_scheduler(cache.kv_cache_config)
    output = layout.module("vllm.v1.core.sched.output").SchedulerOutput.make_empty()
    for name, length in (("goes on", 400), ("ends", 100)):
        asked = cache_groups.request(length, do_remote_decode=True)
        asked.request_id = name
        cache.allocate_slots(asked, 100)
        held = cache.get_blocks(name)
        scheduler.update_state_after_alloc(asked, held, 0)
        output.num_scheduled_tokens[name] = 100
        output.scheduled_new_reqs.append(
            SimpleNamespace(req_id=name, block_ids=held.get_block_ids())
        )
    assert "ends" in scheduler.build_connector_meta(output).reqs_to_save
