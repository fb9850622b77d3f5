# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels behind the indexer's scores, for e4m3 and for MXFP4 operands.

e4m3 values, and e2m1 values times the power of two of their block, are exact in bf16:
the products run on bf16 matrix units and accumulate in fp32. A program scores one tile
of keys against several queries.
"""

from ._fp4 import mxfp4_to_bf16
from ._fp8 import e4m3_shifted
from ._triton import tl, triton


@triton.jit
def _to_bf16(codes, dim, exponent, FP4: tl.constexpr):
    """bf16 values of uint8 codes: e4m3, or two e2m1 a byte for values 2i and 2i + 1.

    `dim` is the number of each value in its vector; `exponent`, the UE8M0 code of its
    block, counts for e2m1 alone.
    """
    if FP4:
        code = (codes.to(tl.int32) >> (4 * (dim % 2))) & 15
        value = mxfp4_to_bf16(code, exponent)
    else:
        value = (e4m3_shifted(codes) * 2.0**120).to(tl.bfloat16)
    return value


@triton.jit
def _score(
    keys,  # [DIM, KEYS] bf16
    q_ptr,
    q_scale_ptr,
    q_scale_offset,
    weight_ptr,
    alive,
    num_heads,
    q_stride_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FP4: tl.constexpr,
):
    """Weighted sum over heads of relu(query . keys), `[KEYS]`."""
    VALUES_A_BYTE: tl.constexpr = 2 if FP4 else 1
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)[None, :]
    real = (head < num_heads) & alive
    codes = tl.load(
        q_ptr + head[:, None] * q_stride_head + dim // VALUES_A_BYTE,
        mask=real[:, None] & (dim < DIM),
        other=0,
    )  # [HEADS, DIM]
    if FP4:
        word = tl.load(q_scale_ptr + q_scale_offset + head, mask=real, other=0)
        exponent = (word[:, None] >> (8 * (dim // BLOCK))) & 0xFF
    else:
        exponent = 0
    queries = _to_bf16(codes, dim, exponent, FP4)
    weight = tl.load(weight_ptr + head, mask=real, other=0.0)
    products = tl.dot(queries, keys)  # [HEADS, KEYS]
    return tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)


@triton.jit
def mqa_logits_kernel(
    q_ptr,
    q_scale_ptr,
    kv_ptr,
    kv_scale_ptr,
    weight_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    num_rows,
    num_keys,
    num_heads,
    q_stride_row,
    q_stride_head,
    q_scale_stride,
    kv_stride,
    weight_stride,
    out_stride,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FP4: tl.constexpr,
):
    """Rows over gathered keys. `q_scale_ptr` counts for MXFP4 alone, whose scales are
    int32 words of four UE8M0 codes; those of e4m3 keys are fp32."""
    VALUES_A_BYTE: tl.constexpr = 2 if FP4 else 1
    first = tl.program_id(0) * ROWS
    tile = tl.program_id(1) * KEYS
    key = tile + tl.arange(0, KEYS)
    row = first + tl.arange(0, ROWS)
    starts = tl.load(start_ptr + row, mask=row < num_rows, other=num_keys)
    ends = tl.load(end_ptr + row, mask=row < num_rows, other=0)
    reached = (starts < tl.minimum(ends, tile + KEYS)) & (ends > tile)
    needed = tl.max(reached.to(tl.int32), axis=0) > 0
    present = (key < num_keys) & needed
    dim = tl.arange(0, DIM)[:, None]
    codes = tl.load(
        kv_ptr + key.to(tl.int64)[None, :] * kv_stride + dim // VALUES_A_BYTE,
        mask=present[None, :] & (dim < DIM),
        other=0,
    )
    scale = tl.load(kv_scale_ptr + key, mask=present, other=0)
    exponent = (scale[None, :] >> (8 * (dim // BLOCK))) & 0xFF if FP4 else 0
    keys = _to_bf16(codes, dim, exponent, FP4)
    for i in range(0, ROWS):
        r = (first + i).to(tl.int64)
        if r < num_rows:
            start = tl.load(start_ptr + r)
            end = tl.load(end_ptr + r)
            out = out_ptr + r * out_stride + key
            if (start < tl.minimum(end, tile + KEYS)) & (end > tile):
                score = _score(
                    keys,
                    q_ptr + r * q_stride_row,
                    q_scale_ptr,
                    r * q_scale_stride,
                    weight_ptr + r * weight_stride,
                    r < num_rows,
                    num_heads,
                    q_stride_head,
                    HEADS,
                    DIM,
                    BLOCK,
                    FP4,
                )
                if not FP4:
                    score *= scale
                inside = present & (key >= start) & (key < end)
                value = tl.where(inside, score, -float("inf"))
                tl.store(out, value, mask=key < num_keys)
            else:
                tl.store(out, -float("inf"), mask=key < num_keys)


@triton.jit
def paged_mqa_logits_kernel(
    q_ptr,
    q_scale_ptr,
    cache_ptr,
    weight_ptr,
    len_ptr,
    table_ptr,
    out_ptr,
    num_blocks,
    num_heads,
    width,
    table_width,
    block_stride,
    q_stride_request,
    q_stride_token,
    q_stride_head,
    q_scale_stride_request,
    q_scale_stride_token,
    weight_stride,
    len_stride,
    table_stride,
    out_stride,
    NEXT_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LENS: tl.constexpr,
    FP4: tl.constexpr,
):
    """Tokens over paged keys. A page holds the codes of its keys, then their scales:
    an fp32 for an e4m3 key, DIM / BLOCK bytes of UE8M0 for an MXFP4 key."""
    VALUES_A_BYTE: tl.constexpr = 2 if FP4 else 1
    WIDTH: tl.constexpr = DIM // VALUES_A_BYTE
    SCALES: tl.constexpr = DIM // BLOCK if FP4 else 4
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * KEYS
    key = tile + tl.arange(0, KEYS)
    longest = 0
    for j in range(0, NEXT_N):
        longest = tl.maximum(
            longest, tl.load(len_ptr + request * len_stride + (j if ROW_LENS else 0))
        )
    out = out_ptr + request * NEXT_N * out_stride + key
    if tile < longest:
        wanted = (key < longest) & (key // BLOCK_SIZE < table_width)
        block = tl.load(
            table_ptr + request * table_stride + key // BLOCK_SIZE,
            mask=wanted,
            other=-1,
        ).to(tl.int64)
        present = wanted & (block >= 0) & (block < num_blocks)
        page = block * block_stride
        token = key % BLOCK_SIZE
        dim = tl.arange(0, DIM)[:, None]
        loaded = present[None, :] & (dim < DIM)
        codes = tl.load(
            cache_ptr + (page + token * WIDTH)[None, :] + dim // VALUES_A_BYTE,
            mask=loaded,
            other=0,
        )
        scales = cache_ptr + page + BLOCK_SIZE * WIDTH + token * SCALES
        if FP4:
            exponent = tl.load(scales[None, :] + dim // BLOCK, mask=loaded, other=0)
            exponent = exponent.to(tl.int32)
        else:
            exponent = 0
            scale = tl.load(
                scales.to(tl.pointer_type(tl.float32)), mask=present, other=0.0
            )
        keys = _to_bf16(codes, dim, exponent, FP4)
        for j in range(0, NEXT_N):
            if ROW_LENS:
                length = tl.load(len_ptr + request * len_stride + j)
            else:
                length = tl.load(len_ptr + request * len_stride) - (NEXT_N - 1 - j)
            score = _score(
                keys,
                q_ptr + request * q_stride_request + j * q_stride_token,
                q_scale_ptr,
                request * q_scale_stride_request + j * q_scale_stride_token,
                weight_ptr + (request * NEXT_N + j) * weight_stride,
                tile < length,
                num_heads,
                q_stride_head,
                HEADS,
                DIM,
                BLOCK,
                FP4,
            )
            if not FP4:
                score *= scale
            inside = present & (key < length)
            value = tl.where(inside, score, -float("inf"))
            tl.store(out + j * out_stride, value, mask=key < width)
    else:
        for j in range(0, NEXT_N):
            tl.store(out + j * out_stride, -float("inf"), mask=key < width)
