# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts whose weights lie in host memory, some of them in slots on the device.

A step's experts that have no slot are read from host memory into the slots that were
used least of late, in two launches that wait for no host, so that a captured graph fits
any choice. A step that may need more experts than there are slots is served in waves.
"""

from dataclasses import dataclass
from functools import partial

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_once,
    check_shape,
    fail,
)
from .._launch import cdiv, launch_options, next_power_of_2
from ._expert_cache_kernels import _assign_kernel, _fetch_kernel
from ._experts_checks import check_experts
from ._experts_formats import MXFP4
from ._experts_launch import (
    FEW_PAIRS,
    combine,
    expert_rows,
    route,
    workspace_bytes,
    workspace_sizes,
)
from ._experts_route import by_pair

WORD = 8
"""Bytes of a word of the copy."""
BLOCK = 4096
"""Words that a program of the copy has in flight."""
COPIERS = 256
"""Programs of the copy at most: a launch without a miss is short."""

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""w13, w13_scale, w2 and w2_scale, as `arrange_mxfp4_experts` leaves them."""


@dataclass(frozen=True)
class ExpertCache:
    """The experts of a layer in host memory, and those that have a slot.

    Attributes:
        host (Weights):
            All experts, `[E, ...]`, as the device reads them in pinned host memory.
        slots (Weights):
            Those on the device, `[S, ...]`.
        words (tuple[torch.Tensor, ...]):
            Both, flat, in words of the copy, int64.
        slot_of (torch.Tensor):
            Slot of each expert or -1, `[E]`, int32.
        expert_of (torch.Tensor):
            Expert of each slot or -1, `[S]`, int32.
        heat (torch.Tensor):
            How much each slot was used of late, `[S]`, int32: a use adds 2**20, a token
            takes an eighth, a step at most a half.
        counts (torch.Tensor):
            Waves; hits; and misses, in experts; and those of the last
            wave: `[4]`, int64.
        waiting (torch.Tensor):
            Experts that this step needs in later waves, `[E]`, int32.
        here (torch.Tensor):
            Slot of each expert of this wave or -1, `[E]`, int32.
        fetched (torch.Tensor):
            Experts and slots of this wave's misses, as many as `counts` says, `[2, S]`,
            int32.

    """

    host: Weights
    slots: Weights
    words: tuple[torch.Tensor, ...]
    slot_of: torch.Tensor
    expert_of: torch.Tensor
    heat: torch.Tensor
    counts: torch.Tensor
    waiting: torch.Tensor
    here: torch.Tensor
    fetched: torch.Tensor

    @property
    def slots_of_experts(self) -> tuple[int, int]:
        """E and S."""
        return len(self.slot_of), len(self.expert_of)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, which a miss reads over the link."""
        return sum(part[0].numel() for part in self.slots)

    def waves(self, pairs: int) -> int:
        """Waves that serve `pairs` pairs of token and expert, however they fall."""
        return cdiv(min(pairs, len(self.slot_of)), len(self.expert_of))


def make_expert_cache(
    host: Weights, num_slots: int, device: torch.device
) -> ExpertCache:
    """An empty cache.

    Args:
        host (Weights):
            All experts, contiguous, uint8, as the device reads them.
        num_slots (int):
            S; from 1 to E, more than E count as E.
        device (torch.device):
            Where slots and tables are allocated.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    experts = len(host[0])
    if num_slots < 1:
        fail("num_slots", num_slots, "1 or more")
    num_slots = min(num_slots, experts)
    for name, part in zip(("w13", "w13_scale", "w2", "w2_scale"), host, strict=True):
        check_dtype(name, part, torch.uint8)
        check_shape(name, part, experts, None, None)
        if not part.is_contiguous():
            fail(f"{name}.stride()", tuple(part.stride()), "a contiguous tensor")
        if part[0].numel() % WORD or part.data_ptr() % WORD:
            fail(f"{name}[0].numel()", part[0].numel(), f"a multiple of {WORD}")
    slots = tuple(
        torch.empty((num_slots, *part.shape[1:]), dtype=torch.uint8, device=device)
        for part in host
    )

    def table(
        *shape: int, value: int = 0, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return ExpertCache(
        host=host,
        slots=(slots[0], slots[1], slots[2], slots[3]),
        words=tuple(part.view(-1).view(torch.int64) for part in (*host, *slots)),
        slot_of=table(experts, value=-1),
        expert_of=table(num_slots, value=-1),
        heat=table(num_slots),
        counts=table(4, dtype=torch.int64),
        waiting=table(experts),
        here=table(experts, value=-1),
        fetched=table(2, num_slots, value=-1),
    )


def fetch_experts(cache: ExpertCache, topk_ids: torch.Tensor, wave: int = 0) -> None:
    """Give a wave's experts slots, and read those that had none, in two launches.

    `cache.here` then says where this wave's experts are. Call it for each wave of
    `cache.waves(topk_ids.numel())` in order; wave 0 begins with the experts that have a
    slot.

    Args:
        cache (ExpertCache):
            Of the layer.
        topk_ids (torch.Tensor):
            Chosen experts, of shape `[T, K]`, int32 or int64. One that does not exist
            is left out.
        wave (int):
            Number of the wave.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check_shape("topk_ids", topk_ids, None, None)
    check_inner_contiguous("topk_ids", topk_ids)
    if topk_ids.numel():
        _assign(cache, topk_ids, wave)
        _fetch(cache, topk_ids)


def _assign(cache: ExpertCache, topk_ids: torch.Tensor, wave: int) -> None:
    """Give a wave's experts slots, in one launch."""
    pairs, (experts, num_slots) = topk_ids.numel(), cache.slots_of_experts
    few = pairs <= FEW_PAIRS or wave > 0
    _assign_kernel[(1,)](
        topk_ids,
        cache.slot_of,
        cache.expert_of,
        cache.heat,
        cache.counts,
        cache.waiting,
        cache.here,
        *cache.fetched,
        pairs,
        topk_ids.shape[1],
        experts,
        num_slots,
        topk_ids.stride(0),
        IS_FIRST=wave == 0,
        CHUNK=8,
        BLOCK_E=next_power_of_2(experts),
        BLOCK_S=next_power_of_2(num_slots),
        **launch_options(topk_ids.device, num_warps=4 if few else 16),
    )


def _fetch(
    cache: ExpertCache,
    topk_ids: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor] | None = None,
    block_m: int = 1,
) -> None:
    """Read a wave's misses, and give each pair its tile meanwhile, in one launch."""
    pairs, (experts, num_slots) = topk_ids.numel(), cache.slots_of_experts
    sizes = [part[0].numel() // WORD for part in cache.slots]
    blocks = sum(cdiv(size, BLOCK) for size in sizes)
    copiers = min(COPIERS, blocks * min(pairs, num_slots))
    _fetch_kernel[(copiers + (pairs if tiles else 0),)](
        *cache.words,
        cache.counts,
        *cache.fetched,
        topk_ids,
        cache.here,
        *(tiles or (cache.here, cache.here)),
        pairs,
        topk_ids.shape[1],
        experts,
        num_slots,
        topk_ids.stride(0),
        tiles is not None,
        block_m,
        FEW_PAIRS,
        *sizes,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        COPIERS=copiers,
        **launch_options(topk_ids.device, num_warps=8),
    )


def _fetch_and_route(
    cache: ExpertCache,
    wave: int,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    tile_experts: torch.Tensor,
    tile_pairs: torch.Tensor,
    block_m: int,
) -> None:
    """`route` of a wave, whose experts get slots before."""
    _assign(cache, topk_ids, wave)
    if topk_ids.numel() <= FEW_PAIRS and by_pair(topk_ids.numel(), experts, block_m):
        _fetch(cache, topk_ids, (tile_experts, tile_pairs), block_m)
        return
    _fetch(cache, topk_ids)
    route(topk_ids, expert_map, experts, tile_experts, tile_pairs, block_m)


def cached_workspace_size(
    tokens: int,
    topk: int,
    experts: int,
    num_slots: int,
    hidden: int,
    intermediate: int,
) -> int:
    """Bytes of memory that `cached_experts` needs besides its arguments and result.

    Args:
        tokens (int): rows of `hidden_states`.
        topk (int): experts of a token.
        experts (int): experts of the layer.
        num_slots (int): those on the device.
        hidden (int): size of a row.
        intermediate (int): columns of the gate on this rank.

    """
    sizes = (tokens * topk, num_slots, hidden, intermediate, experts)
    return workspace_bytes(workspace_sizes(*sizes))


def cached_experts(
    hidden_states: torch.Tensor,
    cache: ExpertCache,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's experts, weighted and summed: the bits of `routed_experts`.

    Four launches a wave, five of more than 64 pairs, and one for the sum, none of which
    waits for the host.

    Args:
        hidden_states (torch.Tensor):
            Rows of shape `[T, H]`, bf16; may be strided.
        cache (ExpertCache):
            Of the layer.
        topk_weights (torch.Tensor):
            Weight of each chosen expert, of shape `[T, K]`, fp32 or bf16.
        topk_ids (torch.Tensor):
            Chosen experts, of shape `[T, K]`, int32 or int64. One that does not exist
            adds nothing.
        swiglu_limit (float | None):
            The clamp; None for none.
        out (torch.Tensor | None):
            Where to write the result, of shape `[T, H]`, bf16. None allocates.
        workspace (torch.Tensor | None):
            `cached_workspace_size` bytes, uint8. None allocates.

    Returns:
        Rows of shape `[T, H]`, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    out, workspace = take_arguments(
        hidden_states, cache, topk_weights, topk_ids, out, workspace
    )
    if not topk_ids.numel():
        return out.zero_()
    experts = len(cache.slot_of)
    for wave in range(cache.waves(topk_ids.numel())):
        rows = expert_rows(
            hidden_states,
            *cache.slots,
            topk_ids,
            cache.here,
            swiglu_limit,
            workspace,
            experts,
            MXFP4,
            partial(_fetch_and_route, cache, wave),
        )
    combine(rows, topk_weights, topk_ids, None, experts, out)
    return out


def take_arguments(
    hidden_states: torch.Tensor,
    cache: ExpertCache,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments of `cached_experts`; return `out` and `workspace`, allocated
    where they are None.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    experts = len(cache.slot_of)
    check_once(
        check_experts,
        hidden_states,
        *cache.slots,
        topk_weights,
        topk_ids,
        cache.here,
        out,
        workspace,
        experts,
        MXFP4,
    )
    (tokens, hidden), topk = hidden_states.shape, topk_ids.shape[1]
    num_slots, columns, _ = cache.slots[0].shape
    device = hidden_states.device
    if out is None:
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
    if workspace is None:
        sizes = (tokens, topk, experts, num_slots, hidden, columns // 2)
        need = cached_workspace_size(*sizes)
        workspace = torch.empty(need, dtype=torch.uint8, device=device)
    return out, workspace
