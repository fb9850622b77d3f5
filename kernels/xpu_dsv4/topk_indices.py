# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the indexer's choice to the slots and rows that attention reads."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_same_device,
    check_shape,
    fail,
)
from ._launch import launch_options
from ._triton import tl, triton

WIDTH_MULTIPLE = 128


@triton.jit
def _global_topk_kernel(
    index_ptr,
    request_ptr,
    table_ptr,
    valid_ptr,
    out_ptr,
    len_ptr,
    topk,
    num_requests,
    table_width,
    block_size,
    index_stride,
    table_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token).to(tl.int64)
    alive = tl.load(valid_ptr + token).to(tl.int32) != 0
    alive = alive & (request >= 0) & (request < num_requests)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, topk, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < topk
        local = tl.load(
            index_ptr + token * index_stride + column, mask=mask & alive, other=-1
        )
        known = (local >= 0) & (local // block_size < table_width)
        block = tl.load(
            table_ptr + request * table_stride + local // block_size,
            mask=known,
            other=-1,
        )
        known = known & (block >= 0)
        slot = tl.where(known, block * block_size + local % block_size, -1)
        tl.store(out_ptr + token * out_stride + column, slot, mask=mask)
        count += known.to(tl.int32)
    tl.store(len_ptr + token, tl.sum(count, axis=0))


def _outputs(
    out: tuple[torch.Tensor, torch.Tensor] | None,
    tokens: int,
    width: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 `[tokens, width]` and `[tokens]`: `out` after its check, or new ones."""
    if out is None:
        rows = torch.empty((tokens, width), dtype=torch.int32, device=device)
        return rows, torch.empty(tokens, dtype=torch.int32, device=device)
    check_shape("out[0]", out[0], tokens, width)
    check_shape("out[1]", out[1], tokens)
    for name, tensor in (("out[0]", out[0]), ("out[1]", out[1])):
        check_dtype(name, tensor, torch.int32)
        check_inner_contiguous(name, tensor)
    return out


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map positions within a request to cache slots and count them. One launch.

    Args:
        topk_indices: compressed positions of shape `[T, K]`, int32, -1 for none.
        token_to_req_indices: request of each token, of shape `[T]`, int32.
        block_table: page of each block of a request, of shape `[R, W]`, int32.
        block_size: entries a page.
        is_valid_token: of shape `[T]`, bool or uint8; false for padding.
        out: (slots, lens) to fill instead of new tensors.

    Returns:
        (slots, lens): slots of shape `[T, K]`, int32, at the place of their index and
        -1 where there is none; lens of shape `[T]`, int32, the number of slots. An
        index beyond the table, a page below 0, a request out of range and a padding
        token give -1.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("topk_indices", topk_indices, None, None)
    check_dtype("topk_indices", topk_indices, torch.int32)
    check_inner_contiguous("topk_indices", topk_indices)
    tokens, topk = topk_indices.shape
    check_shape("token_to_req_indices", token_to_req_indices, tokens)
    check_dtype("token_to_req_indices", token_to_req_indices, torch.int32, torch.int64)
    check_inner_contiguous("token_to_req_indices", token_to_req_indices)
    check_shape("block_table", block_table, None, None)
    check_dtype("block_table", block_table, torch.int32)
    check_inner_contiguous("block_table", block_table)
    if block_size < 1:
        fail("block_size", block_size, "at least 1")
    check_shape("is_valid_token", is_valid_token, tokens)
    check_dtype("is_valid_token", is_valid_token, torch.bool, torch.uint8)
    check_inner_contiguous("is_valid_token", is_valid_token)
    check_same_device(
        topk_indices=topk_indices,
        token_to_req_indices=token_to_req_indices,
        block_table=block_table,
        is_valid_token=is_valid_token,
    )
    check_range("topk_indices", topk_indices, -1, block_table.shape[1] * block_size)
    device = topk_indices.device
    slots, lens = _outputs(out, tokens, topk, device)
    if tokens:
        _global_topk_kernel[(tokens,)](
            topk_indices,
            token_to_req_indices,
            block_table,
            is_valid_token.view(torch.uint8),
            slots,
            lens,
            topk,
            block_table.shape[0],
            block_table.shape[1],
            block_size,
            topk_indices.stride(0),
            block_table.stride(0),
            slots.stride(0),
            BLOCK=512,
            **launch_options(device, num_warps=4),
        )
    return slots, lens


@triton.jit
def _combine_kernel(
    index_ptr,
    query_start_ptr,
    seq_len_ptr,
    gather_len_ptr,
    left_ptr,
    right_ptr,
    out_ptr,
    len_ptr,
    num_requests,
    index_width,
    width,
    topk,
    window,
    ratio,
    request_rows,
    compressed_rows,
    index_stride,
    out_stride,
    HAS_IMAGES: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    base = tl.load(query_start_ptr)
    ended = tl.zeros((REQUESTS,), tl.int32)
    for start in range(0, num_requests, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        mask = request < num_requests
        end = tl.load(query_start_ptr + 1 + request, mask=mask, other=0) - base
        ended += (mask & (end <= token)).to(tl.int32)
    request = tl.sum(ended, axis=0)
    alive = request < num_requests
    query_start = tl.load(query_start_ptr + request, mask=alive, other=0) - base
    query_end = tl.load(query_start_ptr + request + 1, mask=alive, other=0) - base
    seq_len = tl.load(seq_len_ptr + request, mask=alive, other=0)
    gather_len = tl.load(gather_len_ptr + request, mask=alive, other=0)
    position = seq_len - query_end + token.to(tl.int32)
    alive = alive & (position >= 0) & (token >= query_start)
    topk_len = tl.where(alive, tl.minimum((position + 1) // ratio, topk), 0)
    newest = position
    if HAS_IMAGES:
        window = tl.maximum(window, tl.load(left_ptr + token) + 1)
        newest += tl.maximum(tl.load(right_ptr + token), 0)
    window_len = newest - position + tl.minimum(position + 1, window)
    window_len = tl.where(alive, tl.minimum(window_len, width - topk_len), 0)
    total = topk_len + window_len

    row = request * request_rows
    oldest = row + compressed_rows + newest + 1 - window_len - (seq_len - gather_len)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        chosen = tl.load(
            index_ptr + token * index_stride + column,
            mask=(column < topk_len) & (column < index_width),
            other=-1,
        )
        value = tl.where(chosen >= 0, chosen + row, -1)
        recent = (column >= topk_len) & (column < total)
        value = tl.where(recent, oldest + column - topk_len, value)
        tl.store(out_ptr + token * out_stride + column, value, mask=column < width)
    tl.store(len_ptr + token, total)


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image_tokens: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the gathered KV buffer that each prefill token reads. One launch.

    The buffer holds M rows a request: N compressed entries at most, then the last
    `gather_len` raw tokens. A token at position p reads its first
    `min((p + 1) // compress_ratio, topk)` chosen entries, then the
    `min(p + 1, window_size)` raw tokens that end with itself. Tokens of an image see
    all of it: the raw tokens then begin at p - max(window_size - 1, left), at least 0,
    and end at p + right. Where these do not fit the width, the newest count.

    Args:
        topk_indices: compressed positions of shape `[T, K]`, int32, -1 for none.
        query_start_loc: first token of each request and the end, of shape `[R + 1]`,
            int32; counted from its own first value.
        seq_lens: tokens of each request including these, of shape `[R]`, int32.
        gather_lens: raw tokens gathered for each request, of shape `[R]`, int32.
        window_size: raw tokens that a token sees.
        compress_ratio: raw tokens a compressed entry.
        topk: compressed entries that a token sees at most; 0 in window-only layers.
        M: rows a request in the buffer.
        N: first raw row of a request.
        out: (indices, lens) to fill instead of new tensors.
        left_visible: tokens of its image before each token, of shape `[T]`, int32; 0
            outside images. None, with `right_visible`, without images.
        right_visible: tokens of its image after each token, as `left_visible`.
        max_image_tokens: columns to add for images.

    Returns:
        (indices, lens): indices of shape `[T, width]`, int32, width = topk +
        window_size + max_image_tokens rounded up to 128, -1 after the first `lens`
        columns; lens of shape `[T]`, int32. Tokens of no request have length 0.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("topk_indices", topk_indices, None, None)
    check_dtype("topk_indices", topk_indices, torch.int32)
    check_inner_contiguous("topk_indices", topk_indices)
    tokens = topk_indices.shape[0]
    requests = seq_lens.shape[0]
    vectors = {
        "query_start_loc": (query_start_loc, requests + 1),
        "seq_lens": (seq_lens, requests),
        "gather_lens": (gather_lens, requests),
    }
    if left_visible is not None or right_visible is not None:
        for name, tensor in (
            ("left_visible", left_visible),
            ("right_visible", right_visible),
        ):
            if tensor is None:
                fail(name, None, "a tensor beside the other side's")
            vectors[name] = (tensor, tokens)
    for name, (tensor, size) in vectors.items():
        check_shape(name, tensor, size)
        check_dtype(name, tensor, torch.int32)
        check_inner_contiguous(name, tensor)
        check_range(name, tensor, 0, 2**31)
    sizes = {
        "window_size": window_size,
        "topk": topk,
        "max_image_tokens": max_image_tokens,
    }
    for name, value in sizes.items():
        if value < 0:
            fail(name, value, "at least 0")
    if compress_ratio < 1:
        fail("compress_ratio", compress_ratio, "at least 1")
    check_same_device(
        topk_indices=topk_indices,
        **{name: tensor for name, (tensor, _) in vectors.items()},
    )
    device = topk_indices.device
    columns = topk + window_size + max_image_tokens
    width = triton.cdiv(columns, WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    indices, lens = _outputs(out, tokens, width, device)
    if tokens:
        _combine_kernel[(tokens,)](
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            left_visible,
            right_visible,
            indices,
            lens,
            requests,
            topk_indices.shape[1],
            width,
            topk,
            window_size,
            compress_ratio,
            M,
            N,
            topk_indices.stride(0),
            indices.stride(0),
            HAS_IMAGES=left_visible is not None,
            REQUESTS=256,
            BLOCK=256,
            **launch_options(device, num_warps=4),
        )
    return indices, lens
