# SPDX-License-Identifier: Apache-2.0
"""Experts in host memory: tables against plain Python, rows against residents."""

import random

import pytest
import torch
from expert_calls import make, on

from kernels.reference.moe.expert_cache import ExpertCache as Reference
from kernels.xpu_dsv4.moe import expert_cache, experts

HIDDEN, INTERMEDIATE = 64, 32


def host_weights(count: int, device: torch.device, seed: int = 0):
    """Arranged weights of `count` experts, as the device reads them on the host."""
    call = make(1, 1, count, HIDDEN, INTERMEDIATE, seed)
    _, *weights, _, _, _ = on(call, torch.device("cpu"))
    return tuple(w.pin_memory() if device.type == "cuda" else w for w in weights)


def cache_of(count: int, num_slots: int, device: torch.device):
    cache = expert_cache.make_expert_cache(
        host_weights(count, device), num_slots, device
    )
    for part in cache.slots:
        part.fill_(0xA5)
    return cache


def check_tables(cache, reference: Reference) -> None:
    """Tables, counts and bytes are the reference's; every slot has its expert."""
    assert cache.expert_of.tolist() == reference.slots
    slot_of = [-1] * reference.experts
    for slot, expert in enumerate(reference.slots):
        if expert >= 0:
            slot_of[expert] = slot
            for held, whole in zip(cache.slots, cache.host, strict=True):
                assert torch.equal(held[slot].cpu(), whole[expert])
    assert cache.slot_of.tolist() == slot_of
    assert cache.counts[1:3].tolist() == [reference.hits, reference.misses]


def serve(cache, reference: Reference, ids: torch.Tensor) -> int:
    """One step on both; returns how many waves had an expert."""
    wanted = reference.step(ids.flatten().tolist(), len(ids))
    waves = cache.waves(ids.numel())
    assert len(wanted) <= waves
    for wave in range(waves):
        expert_cache.fetch_experts(cache, ids, wave)
        here = wanted[wave] if wave < len(wanted) else {}
        expected = [here.get(expert, -1) for expert in range(reference.experts)]
        assert cache.here.tolist() == expected
    reference.wave = int(cache.counts[0])
    check_tables(cache, reference)
    return len(wanted)


def local_routing(steps: int, tokens: int, topk: int, count: int, seed: int = 0):
    """Synthetic choices with locality: most of a token's experts were chosen lately."""
    rng = random.Random(seed)
    recent = rng.sample(range(count), topk)
    for _ in range(steps):
        rows = []
        for _ in range(tokens):
            chosen: list[int] = []
            while len(chosen) < topk:
                near = rng.random() < 0.7
                expert = rng.choice(recent) if near else rng.randrange(count)
                if expert not in chosen:
                    chosen.append(expert)
            recent = (recent + chosen)[-3 * topk :]
            rows.append(chosen)
        yield torch.tensor(rows)


@pytest.mark.parametrize(
    ("count", "num_slots", "tokens", "topk"),
    [(16, 6, 1, 2), (24, 7, 1, 6), (40, 12, 2, 6), (8, 8, 3, 2), (5, 9, 1, 2)],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_are_those_of_a_plain_cache(
    count, num_slots, tokens, topk, dtype, device
):
    cache = cache_of(count, num_slots, device)
    reference = Reference(count, [-1] * min(num_slots, count))
    for ids in local_routing(12, tokens, topk, count):
        serve(cache, reference, ids.to(device, dtype))
    assert reference.hits and reference.misses
    size = sum(part[0].numel() for part in cache.host)
    assert cache.expert_bytes == size


def test_ids_that_do_not_exist(device):
    cache, reference = cache_of(6, 3, device), Reference(6, [-1] * 3)
    ids = torch.tensor([[-1, 6], [2**31 - 1, 3], [-(2**31), 3]])
    serve(cache, reference, ids.int().to(device))
    assert (reference.hits, reference.misses) == (0, 1)
    ids = torch.tensor([[2**32 + 1, -2], [-(2**40), 3], [-3, 2**40]])
    serve(cache, reference, ids.to(device))
    assert (reference.hits, reference.misses) == (1, 1)


def test_all_tokens_to_one_expert(device):
    cache, reference = cache_of(6, 2, device), Reference(6, [-1] * 2)
    for _ in range(2):
        serve(cache, reference, torch.full((9, 1), 5, dtype=torch.int32).to(device))
    assert (reference.hits, reference.misses) == (1, 1)


def test_strided_ids(device):
    wide = torch.full((4, 7), 1, dtype=torch.int32, device=device)
    wide[:, 2:4] = torch.tensor([[3, 0], [2, 3], [0, 2], [3, 2]])
    serve(cache_of(6, 4, device), Reference(6, [-1] * 4), wide[:, 2:4])


@pytest.mark.parametrize("num_slots", [1, 2, 5, 6])
def test_more_experts_than_slots_come_in_waves(num_slots, device):
    """A step of all experts, of one more than slots, and small ones between them."""
    count = 12
    cache, reference = cache_of(count, num_slots, device), Reference(count, [])
    reference.slots, reference.heat = [-1] * num_slots, [0] * num_slots
    everyone = torch.arange(count, dtype=torch.int32, device=device).view(6, 2)
    one_more = torch.arange(num_slots + 1, dtype=torch.int32, device=device)[:, None]
    few = torch.tensor([[7]], dtype=torch.int32, device=device)
    assert serve(cache, reference, everyone) == -(-count // num_slots)
    serve(cache, reference, few)
    assert serve(cache, reference, one_more) == 2
    serve(cache, reference, few)
    serve(cache, reference, everyone)


def test_no_expert_of_the_step_is_evicted(device):
    """The slot used least holds an expert that the step needs."""
    cache, reference = cache_of(6, 2, device), Reference(6, [-1] * 2)
    for ids in ([[0]], [[1]], [[0, 4]], [[4, 5]]):
        serve(cache, reference, torch.tensor(ids, dtype=torch.int32, device=device))
    assert sorted(reference.slots) == [4, 5]


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "num_slots"),
    [(1, 2, 8, 3), (1, 6, 24, 7), (5, 2, 8, 3), (30, 3, 9, 4), (17, 2, 6, 6)],
)
def test_bits_are_those_of_residents(tokens, topk, count, num_slots, device):
    """With a dirty workspace of exactly the size, and an id that does not exist."""
    cache = cache_of(count, num_slots, device)
    size = expert_cache.cached_workspace_size(
        tokens, topk, count, num_slots, HIDDEN, INTERMEDIATE
    )
    resident = [part.to(device) for part in cache.host]
    for seed in range(3):
        call = make(tokens, topk, count, HIDDEN, INTERMEDIATE, seed)
        x, *_, weights, ids, _ = on(call, device)
        ids[tokens // 2, 0] = count
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
        mine = expert_cache.cached_experts(
            x, cache, weights, ids, 10.0, workspace=workspace
        )
        wanted = experts.routed_experts(x, *resident, weights, ids, swiglu_limit=10.0)
        assert torch.equal(mine, wanted)


def test_no_token(device):
    cache = cache_of(4, 2, device)
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, device=device)
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    found = expert_cache.cached_experts(x, cache, ids.float(), ids)
    assert found.shape == (0, HIDDEN)
    expert_cache.fetch_experts(cache, ids)
    assert not cache.counts.any()


def test_replayed_with_other_ids(device):
    """A captured graph is right for any choice: tables and copies are of the device."""
    cache, reference = cache_of(8, 3, device), Reference(8, [-1] * 3)
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=device)

    def step() -> None:
        expert_cache.fetch_experts(cache, ids)

    step()
    again = step
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        again = graph.replay
    reference.step([0, 1])
    for chosen in ([2, 1], [5, 6], [1, 2], [7, 0], [-1, 7]):
        ids.copy_(torch.tensor([chosen]))
        again()
        reference.step(chosen)
        check_tables(cache, reference)


@pytest.mark.parametrize("fault", ["wrong slot", "stale slot", "victim in use"])
def test_a_fault_of_the_cache_is_seen(fault, device):
    """Each fault, made in the tables between two steps, changes what a check sees."""
    cache, reference = cache_of(6, 3, device), Reference(6, [-1] * 3)
    first, second = (
        torch.tensor(ids, dtype=torch.int32, device=device)
        for ids in ([[0, 1, 2]], [[2, 3, 1]])
    )
    serve(cache, reference, first)
    if fault == "wrong slot":
        cache.slot_of[:3] = torch.tensor([0, 2, 1])
    elif fault == "stale slot":
        cache.slots[0][1].fill_(0)
    else:
        cache.expert_of[1] = 5
        cache.heat[1] = -1
    with pytest.raises(AssertionError):
        serve(cache, reference, second)


@pytest.mark.parametrize(
    ("num_slots", "ids", "message"),
    [
        (0, None, "num_slots = 0"),
        (2, torch.zeros(2, 2), "topk_ids.dtype"),
        (2, torch.zeros(2, dtype=torch.int32), "topk_ids.shape"),
        (2, torch.zeros(2, 4, dtype=torch.int32)[:, ::2], "topk_ids.stride"),
    ],
)
def test_bad_input_is_named(num_slots, ids, message, device):
    with pytest.raises(ValueError, match=message):
        cache = expert_cache.make_expert_cache(
            host_weights(4, device), num_slots, device
        )
        options = {"dtype": ids.dtype, "device": device}
        given = torch.empty_strided(ids.shape, ids.stride(), **options)
        expert_cache.fetch_experts(cache, given)
