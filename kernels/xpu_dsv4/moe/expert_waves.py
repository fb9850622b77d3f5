# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Experts of a large step from host memory: a wave is copied while another computes.

The slots are two banks. What has a slot computes first, a bank after the other; then
the copy engine fills the bank that is done, and the other one computes meanwhile. It
must know from where to where, so the host asks once which experts are needed.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ._experts_formats import MXFP4
from ._experts_launch import combine, expert_rows
from .expert_cache import ExpertCache, cached_experts, take_arguments

USES = 4
"""Pairs for each expert from which on a step is large: it needs nearly all of them."""


@dataclass(frozen=True)
class Wave:
    """Experts that compute together.

    Attributes:
        bank: where they are, 0 or 1.
        slots: slot of each.
        copies: what is read before: the first expert, the first slot, and how many.

    """

    bank: int
    slots: dict[int, int]
    copies: tuple[tuple[int, int, int], ...] = ()


def plan_waves(
    needed: Sequence[int], slot_of: Sequence[int], num_slots: int
) -> list[Wave]:
    """The waves of a step, each in another bank than the one before it if both have
    experts.

    Args:
        needed (Sequence[int]): whether the step needs each expert.
        slot_of (Sequence[int]): slot of each expert or -1.
        num_slots (int): 2 or more.

    """
    half = num_slots // 2
    banks = (range(half), range(half, num_slots))
    held = {e: slot_of[e] for e, is_needed in enumerate(needed) if is_needed}
    waves = [
        Wave(bank, {e: slot for e, slot in held.items() if slot in banks[bank]})
        for bank in (0, 1)
    ]
    missing = [e for e, slot in held.items() if slot < 0]
    bank = 0
    while missing:
        slots = dict(zip(missing, banks[bank], strict=False))
        waves.append(Wave(bank, slots, tuple(_runs(slots))))
        missing = missing[len(slots) :]
        bank = 1 - bank
    return [wave for wave in waves if wave.slots]


def _runs(slots: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Experts that follow each other, as do their slots."""
    first, count = -1, 0
    for expert in slots:
        if count and expert == first + count:
            count += 1
            continue
        if count:
            yield first, slots[first], count
        first, count = expert, 1
    if count:
        yield first, slots[first], count


def overlapped_experts(
    hidden_states: torch.Tensor,
    cache: ExpertCache,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The bits of `cached_experts`, whose arguments these are.

    A large step that needs several waves asks the device once, before any of them, and
    copies by a queue of its own, so a graph cannot capture it. Others are left to
    `cached_experts`.
    """
    pairs, (experts, num_slots) = topk_ids.numel(), cache.slots_of_experts
    waves: list[Wave] = []
    if pairs >= USES * experts and cache.waves(pairs) > 1 and num_slots > 1:
        asked = torch.stack((_needed(topk_ids, experts), cache.slot_of))
        needed, slot_of = asked.tolist()
        waves = plan_waves(needed, slot_of, num_slots)
    if not waves:
        return cached_experts(
            hidden_states,
            cache,
            topk_weights,
            topk_ids,
            swiglu_limit,
            out,
            workspace,
        )
    out, workspace = take_arguments(
        hidden_states, cache, topk_weights, topk_ids, out, workspace
    )
    device = hidden_states.device
    here, after = _tables(cache, waves, slot_of)
    # Whatever ends this early leaves no slot that is said to have an expert.
    cache.slot_of.fill_(-1)
    cache.expert_of.fill_(-1)
    queues: Any = torch.get_device_module(device)
    copies, current = _copy_queue(device), queues.current_stream()
    computed = [queues.Event(), queues.Event()]
    for event in computed:
        event.record(current)
    for wave, table in zip(waves, here, strict=True):
        if wave.copies:
            computed[wave.bank].wait(copies)
            with queues.stream(copies):
                _copy(cache, wave.copies)
            copied = queues.Event()
            copied.record(copies)
            copied.wait(current)
        rows = expert_rows(
            hidden_states,
            *cache.slots,
            topk_ids,
            table,
            swiglu_limit,
            workspace,
            experts,
            MXFP4,
        )
        computed[wave.bank] = queues.Event()
        computed[wave.bank].record(current)
    combine(rows, topk_weights, topk_ids, None, experts, out)
    now, expert_of, counts = after.split((experts, num_slots, 3))
    cache.slot_of.copy_(now)
    cache.expert_of.copy_(expert_of)
    cache.counts[:3].add_(counts)
    cache.heat.zero_()
    return out


def _needed(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Whether each expert is chosen, `[E]`, int32."""
    ids = topk_ids.reshape(-1).long()
    is_expert = (ids >= 0) & (ids < experts)
    needed = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    return needed.index_fill_(0, torch.where(is_expert, ids, experts), 1)[:-1]


@functools.cache
def _copy_queue(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream()


def _copy(cache: ExpertCache, runs: Sequence[tuple[int, int, int]]) -> None:
    for expert, slot, count in runs:
        for host, slots in zip(cache.host, cache.slots, strict=True):
            there = slots[slot : slot + count]
            there.copy_(host[expert : expert + count], non_blocking=True)


def _tables(
    cache: ExpertCache, waves: Sequence[Wave], slot_of: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each expert in each wave or -1, `[waves, E]`; and what the cache has
    at the end: slots of experts, experts of slots, and how many waves, hits and misses
    are new. All int32, by one copy to the device."""
    experts, num_slots = cache.slots_of_experts
    expert_of = [-1] * num_slots
    for expert, slot in enumerate(slot_of):
        if slot >= 0:
            expert_of[slot] = expert
    found = [0, 0]
    here = [[wave.slots.get(e, -1) for e in range(experts)] for wave in waves]
    for wave in waves:
        found[bool(wave.copies)] += len(wave.slots)
        for expert, slot in wave.slots.items():
            expert_of[slot] = expert
    now = [-1] * experts
    for slot, expert in enumerate(expert_of):
        if expert >= 0:
            now[expert] = slot
    flat = [*chain(*here), *now, *expert_of, len(waves), *found]
    made = torch.tensor(flat, dtype=torch.int32, device=cache.slot_of.device)
    size = len(waves) * experts
    return made[:size].view(-1, experts), made[size:]
