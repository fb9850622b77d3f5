# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer: query quantization, key gather, logits and top-k."""

import torch

from standins.emulated_xpu.wheel.formats import (
    E2M1,
    pack_nibbles,
    power_of_two_exponent,
    quotient,
)
from standins.emulated_xpu.wheel.implementations import implements
from standins.emulated_xpu.wheel.pins import kernels_version

INT32_STRIDES = ("0.1.8",)
"""Versions whose paged logits kernel computes page offsets in 32 bits."""
PAGE = 64
"""Keys of a page of the paged logits kernel."""


def e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of fp32 `x` as the indexer's query kernel assembles them.

    Nearest with three bits after the leading one, a midpoint away from zero, and below
    2^-6 cut to a multiple of 2^-9 after that. Beyond 448 it is 448.
    """
    bits = x.view(torch.int32)
    rounded = ((bits & 0x7FFFFFFF) + (1 << 19)).clamp(max=0x43E00000)
    exponent, mantissa = (rounded >> 23) - 120, rounded >> 20 & 7
    subnormal = (8 + mantissa) >> (1 - exponent).clamp(0, 7) & 7
    code = torch.where(exponent > 0, exponent << 3 | mantissa, subnormal)
    return (code | (bits >> 24 & 0x80)).to(torch.uint8)


def e2m1_codes_towards_zero(x: torch.Tensor) -> torch.Tensor:
    """Nibbles of the nearest e2m1 values, a midpoint towards zero, saturating at 6."""
    values = torch.tensor(E2M1)
    code = torch.bucketize(x.abs(), (values[1:] + values[:-1]) / 2)
    return code.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def _rotated(
    q: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor,
    coarsen: int,
) -> torch.Tensor:
    """`q`, `[T, H, D]`, after interleaved RoPE on its last values, rounded to bf16, as
    fp32.

    Raises:
        ValueError: the kernels refuse such arguments, or would read them as what they
            are not.
    """
    if q.shape[2] != 128 or table.shape[1] != 64 or q.shape[1] % coarsen:
        raise ValueError(
            f"indexer queries {tuple(q.shape)}, table {tuple(table.shape)}"
        )
    for given, dtype in (
        (q, torch.bfloat16),
        (weights, torch.bfloat16),
        (positions, torch.int64),
        (table, torch.float32),
    ):
        if given.dtype != dtype or not given.is_contiguous():
            raise ValueError(f"indexer queries: {given.dtype}, {given.stride()}")
    half = table.shape[-1] // 2
    rows = table[positions].float()[:, None]
    cos, sin = rows[..., :half], rows[..., half:]
    x = q.float()
    even, odd = x[..., -2 * half :: 2], x[..., -2 * half + 1 :: 2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((x[..., : -2 * half], pairs.flatten(-2)), -1).bfloat16().float()


def _product(softmax_scale: float, head_scale: float) -> torch.Tensor:
    """Both scales of the weights, multiplied in fp32 before a weight is."""
    return torch.tensor(softmax_scale) * torch.tensor(head_scale)


@implements("_xpu_C::deepseek_fused_indexer_q_rope_fp8")
def deepseek_fused_indexer_q_rope_fp8(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    q_fp8: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    """Rotate and quantize the query, with one power-of-two scale per head, which is
    folded into the weight of the head."""
    x = _rotated(q, positions, cos_sin_cache, index_weights, 2)
    amax = x.abs().amax(-1).clamp(min=1e-4)
    exponent = power_of_two_exponent(quotient(amax, 448))
    scaled = torch.ldexp(x, -exponent[..., None])
    q_fp8.view(torch.uint8).copy_(e4m3_codes(scaled))
    weights = torch.ldexp(index_weights.float(), exponent)
    weights_out.copy_(weights * _product(softmax_scale, head_scale))


@implements("_xpu_C::deepseek_fused_indexer_q_rope_mxfp4")
def deepseek_fused_indexer_q_rope_mxfp4(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    packed_out: torch.Tensor,
    scales_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    """Rotate and quantize the query, with one UE8M0 byte per 32 values."""
    x = _rotated(q, positions, cos_sin_cache, index_weights, 4).unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1).clamp(min=6 * 2.0**-126)
    exponent = power_of_two_exponent(quotient(amax, 6))
    codes = e2m1_codes_towards_zero(torch.ldexp(x, -exponent[..., None])).flatten(-2)
    packed_out.copy_(pack_nibbles(codes))
    scales_out.copy_(exponent + 127)
    weights_out.copy_(index_weights.float() * _product(softmax_scale, head_scale))


@implements("_C_cache_ops::cp_gather_indexer_k_quant_cache")
def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Gather values and scales of the keys, request by request. Rows after the last key
    of the last request stay as they are."""
    pages = kv_cache.as_strided(
        (kv_cache.shape[0], kv_cache.shape[1] * kv_cache.shape[2]),
        (kv_cache.stride(0), 1),
    )
    block_size, width = kv_cache.shape[1], dst_k.shape[1]
    scale_bytes = dst_scale.shape[1]
    lengths = cu_seq_lens.diff().tolist()
    row = 0
    for request, length in enumerate(lengths):
        for first in range(0, length, block_size):
            page = pages[block_table[request, first // block_size]]
            count = min(block_size, length - first)
            rows = slice(row, row + count)
            values = page[: count * width].view(count, width)
            dst_k.view(torch.uint8)[rows] = values
            start = block_size * width
            scales = page[start : start + count * scale_bytes].view(count, scale_bytes)
            dst_scale.view(torch.uint8)[rows] = scales
            row += count


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[M, H, D]`, `[N, D]` and `[M, H]` to `[M, N]`."""
    products = torch.einsum("mhd,kd->mhk", q.float(), keys).relu()
    return torch.einsum("mhk,mh->mk", products, weights)


def check_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> None:
    """Of queries `[M, H, D]` and keys `[N, D]`.

    Raises:
        ValueError: `fp8_mqa_logits` refuses such arguments, or would read them as what
            they are not.
    """
    rows, heads, dim = q.shape
    for name, given, shape, dtype in (
        ("q", q, (rows, heads, dim), torch.float8_e4m3fn),
        ("kv", kv, (len(kv), dim), torch.float8_e4m3fn),
        ("kv_scales", kv_scales, (len(kv),), torch.float32),
        ("weights", weights, (rows, heads), torch.float32),
        ("cu_seqlen_ks", cu_seqlen_ks, (rows,), torch.int32),
        ("cu_seqlen_ke", cu_seqlen_ke, (rows,), torch.int32),
    ):
        _check(f"fp8_mqa_logits: {name}", given, shape, dtype)


def check_paged_logits(
    q_fp8: torch.Tensor,
    kv_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Of queries `[B, N, H, D]` and pages `[P, 64, 1, D + 4]`, which alone may have
    gaps. Lengths are `[B]`: the op takes none for each row of a request.

    Raises:
        ValueError: `fp8_paged_mqa_logits` refuses such arguments, or would read them as
            what they are not.
    """
    requests, next_n, heads, dim = q_fp8.shape
    pages, columns = (len(kv_cache_fp8), PAGE, 1, dim + 4), block_tables.shape[-1]
    for name, given, shape, dtype in (
        ("q_fp8", q_fp8, (requests, next_n, heads, dim), torch.float8_e4m3fn),
        ("a page", kv_cache_fp8[:1], (min(pages[0], 1), *pages[1:]), torch.uint8),
        ("weights", weights, (requests * next_n, heads), torch.float32),
        ("context_lens", context_lens, (requests,), torch.int32),
        ("block_tables", block_tables, (requests, columns), torch.int32),
    ):
        _check(f"fp8_paged_mqa_logits: {name}", given, shape, dtype)


def _check(
    name: str,
    given: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strided: bool = False,
) -> None:
    if given.shape != shape or given.dtype != dtype:
        raise ValueError(
            f"{name}: {tuple(given.shape)} of {given.dtype}, not {shape} of {dtype}"
        )
    if not (strided or given.is_contiguous()):
        raise ValueError(f"{name} must be contiguous, not of strides {given.stride()}")


@implements("_xpu_C::fp8_mqa_logits")
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> torch.Tensor:
    """Scores of each row over all keys, -inf outside the bounds of the row."""
    check_logits(q, kv, kv_scales, weights, cu_seqlen_ks, cu_seqlen_ke)
    scores = _scores(q, kv.float() * kv_scales[:, None], weights)
    key = torch.arange(kv.shape[0])
    inside = (key >= cu_seqlen_ks[:, None]) & (key < cu_seqlen_ke[:, None])
    return scores.where(inside, -torch.inf)


@implements("_xpu_C::fp8_paged_mqa_logits")
def fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kv_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
) -> torch.Tensor:
    """Scores over pages. The length of a request is that of its last row; each row
    before sees one key less.

    Raises:
        IndexError: the offset of a page overflows the 32 bits in which the kernel of
            this version computes it; a device would read foreign memory.
    """
    check_paged_logits(q_fp8, kv_cache_fp8, weights, context_lens, block_tables)
    requests, next_n, _, dim = q_fp8.shape
    block_size, stride = kv_cache_fp8.shape[1], kv_cache_fp8.stride(0)
    pages = kv_cache_fp8.as_strided(
        (kv_cache_fp8.shape[0], block_size * (dim + 4)), (stride, 1)
    )
    overflows = kernels_version() in INT32_STRIDES
    scores = torch.full((requests * next_n, max_model_len), -torch.inf)
    for request, length in enumerate(context_lens.tolist()):
        blocks = block_tables[request, : -(-length // block_size)].long()
        if overflows and len(blocks) and int(blocks.max()) * stride >= 2**31:
            raise IndexError(
                f"fp8_paged_mqa_logits of {kernels_version()}: page {int(blocks.max())}"
                f" of {stride} bytes lies beyond a 32-bit offset"
            )
        page = pages[blocks]
        values = page[:, : block_size * dim].reshape(-1, dim)
        scale = page[:, block_size * dim :].reshape(-1, 4).contiguous()
        keys = values.contiguous().view(torch.float8_e4m3fn).float()
        keys = (keys * scale.view(torch.float32))[:length]
        rows = slice(request * next_n, (request + 1) * next_n)
        scores[rows, :length] = _scores(q_fp8[request], keys, weights[rows])
        for row in range(next_n):
            visible = length - next_n + 1 + row
            scores[request * next_n + row, max(visible, 0) :] = -torch.inf
    return scores


def _top_k(row: torch.Tensor, indices: torch.Tensor, top_k: int) -> None:
    """Write the indices of the `top_k` largest values of `row`, and -1 after them."""
    count = min(top_k, len(row))
    largest = row.topk(count).indices if top_k < len(row) else torch.arange(count)
    indices[:count] = largest.to(indices.dtype)
    indices[count:top_k] = -1


def check_top_k(
    logits: torch.Tensor,
    strides: tuple[int, int],
    bounds: tuple[tuple[torch.Tensor, int], ...],
    indices: torch.Tensor,
    shape: tuple[int, int],
) -> None:
    """Of `bounds`, each with its number of entries, and `indices` of `shape`.

    Raises:
        ValueError: the `top_k_per_row` ops refuse such arguments, or would read or
            write them as what they are not.
    """
    if logits.stride() != strides or len(logits) != shape[0]:
        raise ValueError(
            f"top_k_per_row: logits {tuple(logits.shape)} of strides "
            f"{logits.stride()}, not {shape[0]} rows of {strides}"
        )
    _check("top_k_per_row: logits", logits, logits.shape, torch.float32, strided=True)
    _check("top_k_per_row: indices", indices, shape, torch.int32)
    for given, count in bounds:
        wanted = (count, *given.shape[1:])
        _check("top_k_per_row: bounds", given, wanted, torch.int32)


@implements("_C::top_k_per_row_prefill")
def top_k_per_row_prefill(
    logits: torch.Tensor,
    rowStarts: torch.Tensor,
    rowEnds: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """The best keys of each row, as indices from the first key of the row."""
    bounds = (rowStarts, numRows), (rowEnds, numRows)
    check_top_k(logits, (stride0, stride1), bounds, indices, (numRows, topK))
    rows = zip(rowStarts.tolist(), rowEnds.tolist(), strict=True)
    for row, (start, end) in enumerate(rows):
        _top_k(logits[row, start:end], indices[row], topK)


@implements("_C::top_k_per_row_decode")
def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """The best keys of each row. Whatever the shape of the lengths, the op reads one
    per request; each row before the last one of a request sees one key less."""
    bounds = ((seq_lens, numRows // next_n),)
    check_top_k(logits, (stride0, stride1), bounds, indices, (numRows, topK))
    lengths = seq_lens.flatten().tolist()
    for row in range(numRows):
        length = lengths[row // next_n] - next_n + row % next_n + 1
        _top_k(logits[row, : max(length, 0)], indices[row], topK)
