# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels behind the indexer's scores, for e4m3 and for MXFP4 operands.

e4m3 values, and e2m1 values times the power of two of their block, are exact in bf16:
the products run on bf16 matrix units and accumulate in fp32. A program scores one tile
of gathered keys against several queries, or one token's query against several tiles of
paged keys: what it keeps is unpacked once.

The dims are two halves, each a product of 64 dims into the same sums. Of MXFP4 they are
the even and the odd dims: a byte of e2m1 codes is read once and gives one of each. Of
e4m3 they are the first and the last; `_logits_lanes` has its own order. Keys are the
rows of these products. Of two products in a row triton-xpu gives each sub-group whole
rows, so the sum over heads stays in a sub-group.
"""

from .._fp4 import MXFP4_BLOCK, mxfp4_pair
from .._triton import tl, triton
from ._logits_lanes import e4m3_to_bf16, lane_keys, lane_query, lane_scores
from ._logits_words import word_keys, word_queries, word_scores


@triton.jit
def _tile():
    """Number of this program's tile of keys; tiles run along axes 1 and 2 of the grid.

    Axis 0 runs first, and is that of rows or requests: tiles behind the last key then
    come last.
    """
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def _key_bytes(BYTES: tl.constexpr, LANES_ARE_KEYS: tl.constexpr):
    """Offsets of the bytes of an MXFP4 key, or of half an e4m3 key, `[1, BYTES]`.

    A mask that changes nothing hides from triton-xpu that they are consecutive. A lane
    then loads one byte of a key and not 16, and keys lie beside each other in shared
    local memory: a lane reads 16 values of the left operand at a time instead of one.
    """
    byte_offs = tl.arange(0, BYTES)[None, :]  # [1, BYTES]
    if LANES_ARE_KEYS:
        byte_offs = byte_offs & (BYTES - 1)
    return byte_offs


@triton.jit
def _mxfp4_tile(
    code_ptrs,  # [N, BYTES], or its transpose
    words,  # [N, 1] int32, or its transpose
    byte_offs,  # [1, BYTES], or its transpose
    mask,  # [N, 1], or its transpose
    MXFP4_BLOCK: tl.constexpr = MXFP4_BLOCK,
):
    """The even and the odd dims of vectors, in the shape of `code_ptrs`, bf16.

    A word is the four UE8M0 codes of a vector, that of its first block in the low byte.
    """
    codes = tl.load(code_ptrs, mask=mask, other=0)
    exponents = (words >> (8 * (byte_offs // (MXFP4_BLOCK // 2)))) & 0xFF
    return mxfp4_pair(codes, exponents)


@triton.jit
def _fp8_tile(
    code_ptrs,  # [N, DIM / 2], or its transpose
    mask,  # [N, 1], or its transpose
    DIM: tl.constexpr,
):
    """The first and the second half of vectors' dims, in the shape of `code_ptrs`,
    bf16."""
    low = tl.load(code_ptrs, mask=mask, other=0)
    high = tl.load(code_ptrs + DIM // 2, mask=mask, other=0)
    return e4m3_to_bf16(low), e4m3_to_bf16(high)


@triton.jit
def _query(
    q_ptr,
    q_scales_ptr,
    weights_ptr,
    is_needed,
    num_heads,
    q_head_stride,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    FP4: tl.constexpr,
):
    """Both halves of the heads of one query, `[DIM / 2, BLOCK_H]` bf16 each, and the
    heads' weights."""
    head_offs = tl.arange(0, BLOCK_H)  # [BLOCK_H]
    byte_offs = tl.arange(0, DIM // 2)[:, None]  # [DIM / 2, 1]
    head_mask = (head_offs < num_heads) & is_needed  # [BLOCK_H]
    weights = tl.load(weights_ptr + head_offs, mask=head_mask, other=0.0)  # [BLOCK_H]
    # [DIM / 2, BLOCK_H]
    code_ptrs = q_ptr + head_offs[None, :] * q_head_stride + byte_offs
    if FP4:
        # [BLOCK_H]
        words = tl.load(q_scales_ptr + head_offs, mask=head_mask, other=0)
        # [DIM / 2, BLOCK_H] each
        q0, q1 = _mxfp4_tile(code_ptrs, words[None, :], byte_offs, head_mask[None, :])
    else:
        # [DIM / 2, BLOCK_H] each
        q0, q1 = _fp8_tile(code_ptrs, head_mask[None, :], DIM)
    return q0, q1, weights


@triton.jit
def _scores(
    q0,  # [DIM / 2, BLOCK_H] bf16
    q1,  # [DIM / 2, BLOCK_H] bf16
    weights,  # [BLOCK_H]
    k0,  # [BLOCK_N, DIM / 2] bf16
    k1,  # [BLOCK_N, DIM / 2] bf16
):
    """Weighted sum over the heads of one query of relu(q . k), `[BLOCK_N]`."""
    products = tl.dot(k0, q0)  # [BLOCK_N, BLOCK_H]
    products = tl.dot(k1, q1, products)  # [BLOCK_N, BLOCK_H]
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], axis=1)


@triton.jit
def _find_keys(
    key_offs,
    table_ptr,
    length,
    table_width,
    num_blocks,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Of keys by their positions: which exist, and where in the cache they and their
    scales lie. If CLAMPED, those that do not exist have places in the first page."""
    # Unsigned: a signed division rounds towards zero, and the addresses of a page then
    # take twice the registers on CUDA and 1.2 to 1.6 times the time.
    position_offs = key_offs.to(tl.uint32)
    table_offs = (position_offs // BLOCK_SIZE).to(tl.int32)
    table_mask = (key_offs < length) & (table_offs < table_width)
    blocks = tl.load(table_ptr + table_offs, mask=table_mask, other=-1).to(tl.int64)
    key_mask = table_mask & (blocks >= 0) & (blocks < num_blocks)
    if CLAMPED:
        blocks = tl.where(key_mask, blocks, 0)
    page_offs = blocks * block_stride
    token_offs = (position_offs % BLOCK_SIZE).to(tl.int32)
    return (
        key_mask,
        page_offs + token_offs * KEY_BYTES,
        page_offs + BLOCK_SIZE * KEY_BYTES + token_offs * SCALE_BYTES,
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "out_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "ends_ptr"],
)
def mqa_logits_kernel(
    q_ptr,
    q_scales_ptr,
    kv_ptr,
    kv_scales_ptr,
    weights_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    num_rows,
    num_keys,
    num_heads,
    q_row_stride,
    q_head_stride,
    q_scales_stride,
    kv_stride,
    weights_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    FP4: tl.constexpr,
    LANES_ARE_KEYS: tl.constexpr,
):
    """Rows over gathered keys.

    `q_scales_ptr` counts for MXFP4 alone, whose scales are int32 words of four UE8M0
    codes. The scales of e4m3 keys are fp32.
    """
    first_row = tl.program_id(0) * BLOCK_M
    first_key = _tile() * BLOCK_N
    key_offs = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_offs = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = row_offs < num_rows  # [BLOCK_M]
    starts = tl.load(starts_ptr + row_offs, mask=row_mask, other=num_keys)  # [BLOCK_M]
    ends = tl.load(ends_ptr + row_offs, mask=row_mask, other=0)  # [BLOCK_M]
    # [BLOCK_M]
    overlap_mask = (starts < tl.minimum(ends, first_key + BLOCK_N)) & (ends > first_key)
    is_needed = tl.max(overlap_mask.to(tl.int32), axis=0) > 0
    key_mask = (key_offs < num_keys) & is_needed  # [BLOCK_N]
    key_ptrs = kv_ptr + key_offs.to(tl.int64) * kv_stride  # [BLOCK_N]
    scales = tl.load(kv_scales_ptr + key_offs, mask=key_mask, other=0)  # [BLOCK_N]
    byte_offs = _key_bytes(DIM // 2, LANES_ARE_KEYS)  # [1, DIM / 2]
    code_ptrs = key_ptrs[:, None] + byte_offs  # [BLOCK_N, DIM / 2]
    # [BLOCK_N, DIM / 2] each
    if FP4:
        k0, k1 = _mxfp4_tile(code_ptrs, scales[:, None], byte_offs, key_mask[:, None])
    else:
        k0, k1 = _fp8_tile(code_ptrs, key_mask[:, None], DIM)
    for i in range(0, BLOCK_M):
        row = (first_row + i).to(tl.int64)
        if row < num_rows:
            start = tl.load(starts_ptr + row)
            end = tl.load(ends_ptr + row)
            out_ptrs = out_ptr + row * out_stride + key_offs  # [BLOCK_N]
            if (start < tl.minimum(end, first_key + BLOCK_N)) & (end > first_key):
                # [DIM / 2, BLOCK_H] each, and [BLOCK_H]
                q0, q1, weights = _query(
                    q_ptr + row * q_row_stride,
                    q_scales_ptr + row * q_scales_stride if FP4 else q_ptr,
                    weights_ptr + row * weights_stride,
                    row < num_rows,
                    num_heads,
                    q_head_stride,
                    BLOCK_H,
                    DIM,
                    FP4,
                )
                scores = _scores(q0, q1, weights, k0, k1)  # [BLOCK_N]
                if not FP4:
                    scores *= scales
                # [BLOCK_N]
                bounds_mask = key_mask & (key_offs >= start) & (key_offs < end)
                tl.store(out_ptrs, scores, mask=bounds_mask)


@triton.jit(do_not_specialize=["num_blocks", "table_width", "table_stride", "tiles"])
def paged_mqa_logits_kernel(
    q_ptr,
    q_scales_ptr,
    cache_ptr,
    weights_ptr,
    lens_ptr,
    table_ptr,
    out_ptr,
    num_blocks,
    num_heads,
    width,
    table_width,
    block_stride,
    q_request_stride,
    q_token_stride,
    q_head_stride,
    q_scales_request_stride,
    q_scales_token_stride,
    weights_stride,
    lens_stride,
    table_stride,
    out_stride,
    tiles,
    NEXT_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    ROW_LENS: tl.constexpr,
    FP4: tl.constexpr,
    WARPS: tl.constexpr,
    MXFP4_BLOCK: tl.constexpr = MXFP4_BLOCK,
):
    """Tokens over paged keys.

    A page holds the codes of its keys, then their scales: an fp32 for an e4m3 key,
    DIM / 32 bytes of UE8M0 for an MXFP4 key. WARPS is that of the program where a page
    is whole runs of `BLOCK_N / WARPS` keys and the lanes of a sub-group share each key,
    else 0.
    """
    ROWS: tl.constexpr = BLOCK_N // WARPS if WARPS else 0
    VALUES_PER_BYTE: tl.constexpr = 2 if FP4 else 1
    KEY_BYTES: tl.constexpr = DIM // VALUES_PER_BYTE
    SCALE_BYTES: tl.constexpr = DIM // MXFP4_BLOCK if FP4 else 4
    row = tl.program_id(0).to(tl.int64)
    request = row // NEXT_N
    i = (row % NEXT_N).to(tl.int32)
    first_key = _tile() * (BLOCK_N * tiles)
    longest = tl.full((), 0, tl.int32)
    for token in range(0, NEXT_N):
        len_offs = request * lens_stride + (token if ROW_LENS else 0)
        longest = tl.maximum(longest, tl.load(lens_ptr + len_offs))
    last_key = tl.minimum(first_key + BLOCK_N * tiles, longest)
    if first_key < last_key:
        if ROW_LENS:
            length = tl.load(lens_ptr + request * lens_stride + i)
        else:
            length = tl.load(lens_ptr + request * lens_stride) - (NEXT_N - 1 - i)
        q_row_ptr = q_ptr + request * q_request_stride + i * q_token_stride
        if FP4:
            q_row_scales_ptr = (
                q_scales_ptr
                + request * q_scales_request_stride
                + i * q_scales_token_stride
            )
        else:
            q_row_scales_ptr = q_ptr
        row_weights_ptr = weights_ptr + row * weights_stride
        table_row_ptr = table_ptr + request * table_stride
        if WARPS and FP4:
            queries, weights = word_queries(
                q_row_ptr,
                q_row_scales_ptr,
                row_weights_ptr,
                num_heads,
                q_head_stride,
                BLOCK_H,
            )
        elif WARPS:
            # [DIM / 2, BLOCK_H / 2] each, and [BLOCK_H / 2]
            q0, q1, weights = lane_query(
                q_row_ptr,
                row_weights_ptr,
                0,
                num_heads,
                q_head_stride,
                BLOCK_H // 2,
                DIM,
            )
            other_q0, other_q1, other_weights = lane_query(
                q_row_ptr,
                row_weights_ptr,
                BLOCK_H // 2,
                num_heads,
                q_head_stride,
                BLOCK_H // 2,
                DIM,
            )
        else:
            # [DIM / 2, BLOCK_H] each, and [BLOCK_H]
            q0, q1, weights = _query(
                q_row_ptr,
                q_row_scales_ptr,
                row_weights_ptr,
                first_key < length,
                num_heads,
                q_head_stride,
                BLOCK_H,
                DIM,
                FP4,
            )
        for start in range(first_key, last_key, BLOCK_N):
            key_offs = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            # Of each key, or of the first of each sub-group's.
            first_offs = start + tl.arange(0, WARPS) * ROWS if WARPS else key_offs
            key_mask, places, scale_places = _find_keys(
                first_offs,
                table_row_ptr,
                length,
                table_width,
                num_blocks,
                block_stride,
                BLOCK_SIZE,
                KEY_BYTES,
                SCALE_BYTES,
                CLAMPED=WARPS > 0,
            )
            if WARPS:
                if FP4:
                    # [LANES, WARPS, ROWS] each
                    words, word_scales = word_keys(
                        cache_ptr + places, cache_ptr + scale_places, WARPS, ROWS
                    )
                else:
                    # [BLOCK_N, DIM / 2] each
                    k0, k1 = lane_keys(cache_ptr + places, WARPS, ROWS, DIM)
                row_offs = tl.arange(0, ROWS)[None, :]  # [1, ROWS]
                # [BLOCK_N] each
                key_mask = tl.broadcast_to(key_mask[:, None], (WARPS, ROWS))
                key_mask = tl.reshape(key_mask, (BLOCK_N,))
                scale_places = tl.reshape(
                    scale_places[:, None] + row_offs * SCALE_BYTES, (BLOCK_N,)
                )
            else:
                byte_offs = tl.arange(0, DIM // 2)[None, :]  # [1, DIM / 2]
                # [BLOCK_N, DIM / 2]
                code_ptrs = (cache_ptr + places)[:, None] + byte_offs
                # [BLOCK_N, DIM / 2] each
                if FP4:
                    words = tl.zeros([BLOCK_N], tl.int32)  # [BLOCK_N]
                    # Byte by byte: a page may start at any address.
                    for j in tl.static_range(SCALE_BYTES):
                        # [BLOCK_N]
                        exponents = tl.load(
                            cache_ptr + scale_places + j, mask=key_mask, other=0
                        )
                        words |= exponents.to(tl.int32) << (8 * j)
                    k0, k1 = _mxfp4_tile(
                        code_ptrs, words[:, None], byte_offs, key_mask[:, None]
                    )
                else:
                    k0, k1 = _fp8_tile(code_ptrs, key_mask[:, None], DIM)
            # [BLOCK_N]
            if WARPS and FP4:
                scores = word_scores(
                    queries, weights, words, word_scales, BLOCK_N, BLOCK_H
                )
            elif WARPS:
                scores = lane_scores(
                    q0,
                    q1,
                    weights,
                    other_q0,
                    other_q1,
                    other_weights,
                    k0,
                    k1,
                )
            else:
                scores = _scores(q0, q1, weights, k0, k1)
            if not FP4:
                # [BLOCK_N]
                scale_ptrs = cache_ptr + scale_places
                scales = tl.load(
                    scale_ptrs.to(tl.pointer_type(tl.float32)),
                    mask=key_mask,
                    other=0.0,
                )
                scores *= scales
            logits = tl.where(key_mask, scores, -float("inf"))  # [BLOCK_N]
            out_mask = key_offs < width  # [BLOCK_N]
            out_ptrs = out_ptr + row * out_stride + key_offs  # [BLOCK_N]
            if WARPS:
                # Two stores: their masks are one key a lane, while each lane has the
                # scores of all keys of its sub-group.
                tl.store(out_ptrs, logits, mask=out_mask & (key_offs < length))
                behind_mask = out_mask & (key_offs >= length)  # [BLOCK_N]
                tl.store(out_ptrs, -float("inf"), mask=behind_mask)
            else:
                tl.store(out_ptrs, logits, mask=out_mask)
