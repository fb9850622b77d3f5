# SPDX-License-Identifier: Apache-2.0
"""Experts of a large step from host memory: plans, bits, and the order of queues."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from expert_calls import make, on
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists
from test_expert_cache import HIDDEN, INTERMEDIATE, cache_of

from kernels.xpu_dsv4.moe import expert_cache, expert_waves, experts
from kernels.xpu_dsv4.moe.expert_waves import plan_waves


@given(
    needed=lists(booleans(), min_size=3, max_size=20),
    held=lists(integers(0, 19), unique=True, max_size=20),
    num_slots=integers(2, 19),
)
def test_each_expert_is_in_its_slot_once(needed, held, num_slots):
    slot_of = [-1] * len(needed)
    for slot, expert in enumerate(held[:num_slots]):
        if expert < len(needed):
            slot_of[expert] = slot
    content = {slot: expert for expert, slot in enumerate(slot_of) if slot >= 0}
    computed, half = [], num_slots // 2
    waves = plan_waves(needed, slot_of, num_slots)
    for wave in waves:
        for expert, slot, count in wave.copies:
            content |= {slot + i: expert + i for i in range(count)}
        copied = sum(count for *_, count in wave.copies)
        assert copied in (0, len(wave.slots)) and wave.slots
        assert {slot >= half for slot in wave.slots.values()} == {bool(wave.bank)}
        assert all(content[slot] == expert for expert, slot in wave.slots.items())
        computed += wave.slots
    assert sorted(computed) == [e for e, is_needed in enumerate(needed) if is_needed]
    banks = [wave.bank for wave in waves if wave.copies]
    assert banks == [place % 2 for place in range(len(banks))]


def check_bits(count: int, num_slots: int, steps: int, device: torch.device) -> None:
    """Large steps and a small one in turn, with ids that do not exist."""
    tokens, topk = 4 * count, 2
    cache = cache_of(count, num_slots, device)
    resident = [part.to(device) for part in cache.host]
    size = expert_cache.cached_workspace_size(
        tokens, topk, count, num_slots, HIDDEN, INTERMEDIATE
    )
    for seed in range(steps):
        call = make(tokens if seed % 3 else 1, topk, count, HIDDEN, INTERMEDIATE, seed)
        x, *_, weights, ids, _ = on(call, device)
        ids[0, 0] = count
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
        mine = expert_waves.overlapped_experts(
            x, cache, weights, ids, 10.0, workspace=workspace
        )
        wanted = experts.routed_experts(x, *resident, weights, ids, swiglu_limit=10.0)
        assert torch.equal(mine, wanted)
        check_tables(cache)


def check_tables(cache: expert_cache.ExpertCache) -> None:
    expert_of, slot_of = cache.expert_of.tolist(), cache.slot_of.tolist()
    for slot, expert in enumerate(expert_of):
        if expert >= 0:
            assert slot_of[expert] == slot
            for held, whole in zip(cache.slots, cache.host, strict=True):
                assert torch.equal(held[slot].cpu(), whole[expert].cpu())
    assert sum(slot >= 0 for slot in slot_of) == sum(e >= 0 for e in expert_of)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 6, 11, 12])
def test_bits_are_those_of_residents(num_slots, device):
    check_bits(12, num_slots, 4, device)


def test_no_expert_that_exists(device):
    cache = cache_of(12, 4, device)
    x = torch.randn(24, HIDDEN, device=device).bfloat16()
    ids = torch.full((24, 2), -1, dtype=torch.int32, device=device)
    assert not expert_waves.overlapped_experts(x, cache, ids.float(), ids).any()


def test_a_step_that_ends_early_leaves_no_slot(monkeypatch, device):
    cache = cache_of(12, 4, device)
    call = make(48, 2, 12, HIDDEN, INTERMEDIATE, 0)
    x, *_, weights, ids, _ = on(call, device)
    wanted = expert_waves.overlapped_experts(x, cache, weights, ids)
    rows, left = expert_waves.expert_rows, [1, 2]

    def short_of_memory(*args, **kwargs):
        left.pop()
        return rows(*args, **kwargs)

    monkeypatch.setattr(expert_waves, "expert_rows", short_of_memory)
    with pytest.raises(IndexError):
        expert_waves.overlapped_experts(x, cache, weights, ids)
    monkeypatch.undo()
    assert torch.equal(expert_cache.cached_experts(x, cache, weights, ids), wanted)
    check_tables(cache)


def test_hits_and_misses_are_counted(device):
    cache = cache_of(12, 4, device)
    for hits, misses in ((0, 12), (4, 20)):
        call = make(48, 2, 12, HIDDEN, INTERMEDIATE, 0)
        x, *_, weights, ids, _ = on(call, device)
        assert len(ids.unique()) == 12
        expert_waves.overlapped_experts(x, cache, weights, ids)
        assert cache.counts[1:3].tolist() == [hits, misses]


def test_no_copy_overtakes_what_computes(monkeypatch, device):
    """Between queues: a bank is copied after what computed there last, and computes
    after its copy."""
    log: list[tuple[str, object]] = []

    class Event:
        def record(self, queue: object) -> None:
            log.append(("record", self))
            self.queue = queue

        def wait(self, queue: object) -> None:
            log.append((f"{queue} waits", self))

    queues = SimpleNamespace(
        Event=Event,
        current_stream=lambda: "current",
        stream=lambda queue: nullcontext(),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: queues)
    monkeypatch.setattr(expert_waves, "_copy_queue", lambda _: "copies")
    rows, copy = expert_waves.expert_rows, expert_waves._copy

    def computes(*args, **kwargs):
        log.append(("computes", None))
        return rows(*args, **kwargs)

    def copies(cache, runs):
        log.append(("copies", None))
        copy(cache, runs)

    monkeypatch.setattr(expert_waves, "expert_rows", computes)
    monkeypatch.setattr(expert_waves, "_copy", copies)
    check_bits(12, 4, 3, device)
    wave = ["copies waits", "copies", "record", "current waits", "computes", "record"]
    names = [name for name, _ in log]
    begin = names.index("copies waits")
    assert names[begin : begin + 6 * 6] == wave * 6
    events = [event for _, event in log]
    for at in range(begin, begin + 36, 6):
        # Copied before computing, and two waves behind the last of the same bank.
        assert events[at + 3] is events[at + 2]
        if at >= begin + 12:
            assert events[at] is events[at - 7]
