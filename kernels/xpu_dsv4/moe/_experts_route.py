# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the router's choice to tiles of pairs, and from pairs back to tokens.

A pair is a token and one of its experts, `token * topk + place`. A tile is `BLOCK_M`
pairs of one expert: `tile_experts` has the expert, or -1 for a tile that is not used,
`tile_pairs` the pairs, -1 behind the last. How many tiles there are depends on sizes
alone, so that a captured graph fits any choice.
"""

from .._triton import tl, triton

CHUNK = 1024
"""Pairs that a program looks through at a time."""


def num_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles that `pairs` pairs of `experts` experts may need, however they fall."""
    return min(pairs, pairs // block_m + experts)


def by_pair(pairs: int, experts: int, block_m: int) -> bool:
    """Whether each pair has a tile of its own, used if it is the first of one."""
    return pairs <= pairs // block_m + experts


@triton.jit
def local_expert(
    ids,
    expert_map_ptr,
    num_global,
    num_experts,
    HAS_MAP: tl.constexpr,
):
    """The number of an expert on this rank, or -1 if it is not here. Element-wise."""
    here = (ids >= 0) & (ids < num_global)
    experts = ids
    if HAS_MAP:
        experts = tl.load(expert_map_ptr + ids, mask=here, other=-1)
    here = here & (experts >= 0) & (experts < num_experts)
    return tl.where(here, experts, -1).to(tl.int32)


@triton.jit
def route_pair(
    own,
    ids_ptr,
    expert_map_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_pairs,
    topk,
    num_global,
    num_experts,
    ids_stride,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The tile of one pair: it and the next of its expert, if a multiple of `BLOCK_M`
    of that expert's pairs come before it."""
    pair_offs = tl.arange(0, BLOCK_P)  # [BLOCK_P]
    id_offs = pair_offs + pair_offs // topk * (ids_stride - topk)  # [BLOCK_P]
    ids = tl.load(ids_ptr + id_offs, mask=pair_offs < num_pairs, other=-1)
    own_id = tl.load(ids_ptr + own + own // topk * (ids_stride - topk))
    experts = local_expert(ids, expert_map_ptr, num_global, num_experts, HAS_MAP)
    expert = local_expert(own_id, expert_map_ptr, num_global, num_experts, HAS_MAP)
    same = ((experts == expert) & (experts >= 0)).to(tl.int32)  # [BLOCK_P]
    before = tl.sum(tl.where(pair_offs < own, same, 0), 0)
    count = tl.sum(same, 0) - before
    is_first = (expert >= 0) & (before % BLOCK_M == 0)
    tl.store(tile_experts_ptr + own, tl.where(is_first, expert, -1))
    places = tl.cumsum(same, 0) - 1 - before  # [BLOCK_P]
    pair_mask = (same != 0) & (places >= 0) & (places < BLOCK_M) & is_first
    tl.store(tile_pairs_ptr + own * BLOCK_M + places, pair_offs, mask=pair_mask)
    row_offs = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    empty = (row_offs >= count) & is_first
    tl.store(tile_pairs_ptr + own * BLOCK_M + row_offs, -1, mask=empty)


@triton.jit(
    do_not_specialize=["num_pairs", "topk", "num_global", "num_experts", "ids_stride"]
)
def _route_few_kernel(
    ids_ptr,
    expert_map_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_pairs,
    topk,
    num_global,
    num_experts,
    ids_stride,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The tile of one pair."""
    route_pair(
        tl.program_id(0),
        ids_ptr,
        expert_map_ptr,
        tile_experts_ptr,
        tile_pairs_ptr,
        num_pairs,
        topk,
        num_global,
        num_experts,
        ids_stride,
        HAS_MAP,
        BLOCK_M,
        BLOCK_P,
    )


@triton.jit
def _load_experts(
    pairs,  # [CHUNK]
    ids_ptr,
    expert_map_ptr,
    num_pairs,
    topk,
    num_global,
    num_experts,
    ids_stride,
    HAS_MAP: tl.constexpr,
    IS_FLAT: tl.constexpr,
):
    """The expert on this rank of each pair, or -1, `[CHUNK]`."""
    id_ptrs = ids_ptr + pairs  # [CHUNK]
    if not IS_FLAT:
        id_ptrs += (pairs // topk).to(tl.int64) * (ids_stride - topk)
    ids = tl.load(id_ptrs, mask=pairs < num_pairs, other=-1)  # [CHUNK]
    return local_expert(ids, expert_map_ptr, num_global, num_experts, HAS_MAP)


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_tiles",
        "topk",
        "num_global",
        "num_experts",
        "ids_stride",
    ]
)
def _route_many_kernel(
    ids_ptr,
    expert_map_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_pairs,
    num_tiles,
    topk,
    num_global,
    num_experts,
    ids_stride,
    HAS_MAP: tl.constexpr,
    IS_FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The tiles of one expert.

    With `s` pairs of the experts before it, they begin at tile `s // BLOCK_M + expert`:
    no expert's tiles reach those of the next.
    """
    expert = tl.program_id(0)
    chunk_offs = tl.arange(0, CHUNK)  # [CHUNK]
    smaller = tl.zeros([CHUNK], tl.int32)  # [CHUNK]
    equal = tl.zeros([CHUNK], tl.int32)  # [CHUNK]
    for start in range(0, num_pairs, CHUNK):
        pairs = start + chunk_offs  # [CHUNK]
        experts = _load_experts(
            pairs,
            ids_ptr,
            expert_map_ptr,
            num_pairs,
            topk,
            num_global,
            num_experts,
            ids_stride,
            HAS_MAP,
            IS_FLAT,
        )
        smaller += ((experts >= 0) & (experts < expert)).to(tl.int32)
        equal += (experts == expert).to(tl.int32)
    before = tl.sum(smaller, 0)
    count = tl.sum(equal, 0)
    first = before // BLOCK_M + expert
    end = (before + count) // BLOCK_M + expert + 1
    if expert == num_experts - 1:
        end = num_tiles
    used = tl.cdiv(count, BLOCK_M)
    for start in range(first, end, CHUNK):
        tiles = start + chunk_offs  # [CHUNK]
        mine = tl.where(tiles - first < used, expert, -1)
        tl.store(tile_experts_ptr + tiles, mine, mask=tiles < end)
    found = 0
    for start in range(0, num_pairs, CHUNK):
        pairs = start + chunk_offs  # [CHUNK]
        experts = _load_experts(
            pairs,
            ids_ptr,
            expert_map_ptr,
            num_pairs,
            topk,
            num_global,
            num_experts,
            ids_stride,
            HAS_MAP,
            IS_FLAT,
        )
        same = (experts == expert).to(tl.int32)  # [CHUNK]
        places = found + tl.cumsum(same, 0) - 1  # [CHUNK]
        found += tl.sum(same, 0)
        tl.store(tile_pairs_ptr + first * BLOCK_M + places, pairs, mask=same != 0)
    row_offs = count + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = row_offs < used * BLOCK_M
    tl.store(tile_pairs_ptr + first * BLOCK_M + row_offs, -1, mask=row_mask)


@triton.jit(
    do_not_specialize=["num_global", "num_experts", "ids_stride", "weights_stride"]
)
def _combine_kernel(
    rows_ptr,
    ids_ptr,
    weights_ptr,
    expert_map_ptr,
    out_ptr,
    num_columns,
    num_global,
    num_experts,
    ids_stride,
    weights_stride,
    out_stride,
    HAS_MAP: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Columns of one token: its pairs' rows by their weights, in their order."""
    token = tl.program_id(0).to(tl.int64)
    dim_offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    dim_mask = dim_offs < num_columns  # [BLOCK_D]
    acc = tl.zeros([BLOCK_D], tl.float32)  # [BLOCK_D]
    for place in tl.static_range(TOPK):
        given = tl.load(ids_ptr + token * ids_stride + place)
        expert = local_expert(given, expert_map_ptr, num_global, num_experts, HAS_MAP)
        weight = tl.load(weights_ptr + token * weights_stride + place).to(tl.float32)
        row_ptrs = rows_ptr + (token * TOPK + place) * num_columns + dim_offs
        # [BLOCK_D]
        row = tl.load(row_ptrs, mask=dim_mask & (expert >= 0), other=0.0)
        acc += row.to(tl.float32) * tl.where(expert >= 0, weight, 0.0)
    out_ptrs = out_ptr + token * out_stride + dim_offs  # [BLOCK_D]
    tl.store(out_ptrs, acc.to(tl.bfloat16), mask=dim_mask)
