# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which experts of host memory go to which slots of the device, and the copy."""

from .._triton import tl, triton
from ._experts_route import route_pair

USE = 2**20
"""What a use adds to a slot's heat, of which each token of a step takes an eighth, and
a step at most a half."""
NEVER = 2**28
"""More heat than a slot gets."""


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "topk",
        "num_experts",
        "num_slots",
        "ids_stride",
    ]
)
def _assign_kernel(
    ids_ptr,
    slot_of_ptr,
    expert_of_ptr,
    heat_ptr,
    counts_ptr,
    waiting_ptr,
    here_ptr,
    fetched_experts_ptr,
    fetched_slots_ptr,
    num_pairs,
    topk,
    num_experts,
    num_slots,
    ids_stride,
    IS_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    USE: tl.constexpr = USE,
    NEVER: tl.constexpr = NEVER,
):
    """One program: the slots of a wave's experts.

    In the first wave an expert is needed if `ids` have it, later if it waits. Those
    that have a slot keep it; the others, lowest first, take the slots with the least
    heat, the lowest first, and wait if none is left.
    """
    expert_offs = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    slot_offs = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    is_expert = expert_offs < num_experts
    is_slot = slot_offs < num_slots
    slots = tl.load(slot_of_ptr + expert_offs, mask=is_expert, other=-1)
    # Two below zero, so that no id, nor the expert of an empty slot, is equal.
    held = tl.load(expert_of_ptr + slot_offs, mask=is_slot, other=-2)
    heat = tl.load(heat_ptr + slot_offs, mask=is_slot, other=NEVER)  # [BLOCK_S]
    clock = tl.load(counts_ptr) + 1
    all_hits = tl.load(counts_ptr + 1)
    all_misses = tl.load(counts_ptr + 2)
    busy = tl.zeros([BLOCK_S], tl.int32)
    if IS_FIRST:
        heat -= heat * tl.minimum(num_pairs // topk, 4) >> 3
        needed = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            for place in tl.static_range(CHUNK):
                pair = start + place
                id_ptr = ids_ptr + (pair // topk).to(tl.int64) * ids_stride
                chosen = tl.load(id_ptr + pair % topk, mask=pair < num_pairs, other=-1)
                chosen = tl.where((chosen >= 0) & (chosen < num_experts), chosen, -3)
                needed |= (expert_offs == chosen).to(tl.int32)
                busy |= (held == chosen).to(tl.int32)
    else:
        needed = tl.load(waiting_ptr + expert_offs, mask=is_expert, other=0)
    here = tl.where(needed != 0, slots, -1)  # [BLOCK_E]
    missing = tl.where(slots < 0, needed, 0)  # [BLOCK_E]
    hits = tl.sum(busy, 0)
    fetched = tl.minimum(tl.sum(missing, 0), num_slots - hits)
    free = tl.where(busy != 0, NEVER, heat)
    for entry in range(0, fetched):
        expert = tl.min(tl.where(missing != 0, expert_offs, BLOCK_E), 0)
        coldest = tl.min(free, 0)
        slot = tl.min(tl.where(free == coldest, slot_offs, BLOCK_S), 0)
        victim = tl.max(tl.where(slot_offs == slot, held, -2), 0)
        slots = tl.where(expert_offs == victim, -1, slots)
        slots = tl.where(expert_offs == expert, slot, slots)
        here = tl.where(expert_offs == expert, slot, here)
        missing = tl.where(expert_offs == expert, 0, missing)
        held = tl.where(slot_offs == slot, expert, held)
        busy = tl.where(slot_offs == slot, 1, busy)
        free = tl.where(slot_offs == slot, NEVER, free)
        heat = tl.where(slot_offs == slot, 0, heat)
        tl.store(fetched_experts_ptr + entry, expert)
        tl.store(fetched_slots_ptr + entry, slot)
    tl.store(slot_of_ptr + expert_offs, slots, mask=is_expert)
    tl.store(here_ptr + expert_offs, here, mask=is_expert)
    tl.store(waiting_ptr + expert_offs, missing, mask=is_expert)
    tl.store(expert_of_ptr + slot_offs, held, mask=is_slot)
    heat += tl.where(busy != 0, USE, 0)
    tl.store(heat_ptr + slot_offs, heat, mask=is_slot)
    tl.store(counts_ptr, clock)
    tl.store(counts_ptr + 1, all_hits + hits)
    tl.store(counts_ptr + 2, all_misses + fetched)
    tl.store(counts_ptr + 3, fetched.to(tl.int64))


@triton.jit
def _copy(
    host_ptr,
    slots_ptr,
    expert,
    slot,
    block,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of an expert's words."""
    word_offs = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    word_mask = word_offs < WORDS
    host_ptrs = host_ptr + expert.to(tl.int64) * WORDS + word_offs
    words = tl.load(host_ptrs, mask=word_mask, other=0)  # [BLOCK]
    slots_ptrs = slots_ptr + slot.to(tl.int64) * WORDS + word_offs
    tl.store(slots_ptrs, words, mask=word_mask)


@triton.jit
def _fetch(
    work,
    host_w13_ptr,
    host_w13_scale_ptr,
    host_w2_ptr,
    host_w2_scale_ptr,
    w13_ptr,
    w13_scale_ptr,
    w2_ptr,
    w2_scale_ptr,
    fetched_experts_ptr,
    fetched_slots_ptr,
    W13: tl.constexpr,
    W13_SCALE: tl.constexpr,
    W2: tl.constexpr,
    W2_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Block `work % BLOCKS` of the expert of entry `work // BLOCKS`."""
    END_13: tl.constexpr = (W13 + BLOCK - 1) // BLOCK
    END_13_SCALE: tl.constexpr = END_13 + (W13_SCALE + BLOCK - 1) // BLOCK
    END_2: tl.constexpr = END_13_SCALE + (W2 + BLOCK - 1) // BLOCK
    entry, block = work // BLOCKS, work % BLOCKS
    expert = tl.load(fetched_experts_ptr + entry)
    slot = tl.load(fetched_slots_ptr + entry)
    if block < END_13:
        _copy(host_w13_ptr, w13_ptr, expert, slot, block, W13, BLOCK)
    elif block < END_13_SCALE:
        block -= END_13
        _copy(host_w13_scale_ptr, w13_scale_ptr, expert, slot, block, W13_SCALE, BLOCK)
    elif block < END_2:
        block -= END_13_SCALE
        _copy(host_w2_ptr, w2_ptr, expert, slot, block, W2, BLOCK)
    else:
        block -= END_2
        _copy(host_w2_scale_ptr, w2_scale_ptr, expert, slot, block, W2_SCALE, BLOCK)


@triton.jit(
    do_not_specialize=["num_pairs", "topk", "num_experts", "num_slots", "ids_stride"]
)
def _fetch_kernel(
    host_w13_ptr,
    host_w13_scale_ptr,
    host_w2_ptr,
    host_w2_scale_ptr,
    w13_ptr,
    w13_scale_ptr,
    w2_ptr,
    w2_scale_ptr,
    counts_ptr,
    fetched_experts_ptr,
    fetched_slots_ptr,
    ids_ptr,
    here_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_pairs,
    topk,
    num_experts,
    num_slots,
    ids_stride,
    HAS_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    W13: tl.constexpr,
    W13_SCALE: tl.constexpr,
    W2: tl.constexpr,
    W2_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COPIERS: tl.constexpr,
):
    """Read a wave's misses, each `W13` to `W2_SCALE` words of 8 bytes; and if
    `HAS_TILES`, the first programs fill the tiles of a pair each meanwhile."""
    program = tl.program_id(0)
    if HAS_TILES:
        if program < num_pairs:
            route_pair(
                program,
                ids_ptr,
                here_ptr,
                tile_experts_ptr,
                tile_pairs_ptr,
                num_pairs,
                topk,
                num_experts,
                num_slots,
                ids_stride,
                True,
                BLOCK_M,
                BLOCK_P,
            )
        program -= num_pairs
    if program >= 0:
        end = tl.load(counts_ptr + 3).to(tl.int32) * BLOCKS
        for work in range(program, end, COPIERS):
            _fetch(
                work,
                host_w13_ptr,
                host_w13_scale_ptr,
                host_w2_ptr,
                host_w2_scale_ptr,
                w13_ptr,
                w13_scale_ptr,
                w2_ptr,
                w2_scale_ptr,
                fetched_experts_ptr,
                fetched_slots_ptr,
                W13,
                W13_SCALE,
                W2,
                W2_SCALE,
                BLOCK,
                BLOCKS,
            )
