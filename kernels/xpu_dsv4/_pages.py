# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout of DeepSeek-V4's FP8 KV pages, 584 bytes per token, and its checks.

A page of `block_size` tokens is planar:

1. 576 bytes per token: 448 e4m3 values, then 64 bf16 values of the rotary part;
2. 8 bytes per token: one UE8M0 exponent for each 64 e4m3 values, then one byte unused;
3. padding up to the block stride of the cache.

Exponents in a page are at most 134, a scale of 2^7, and e4m3 codes are finite: the
insert kernels saturate, and a normalized key stays far below 448 * 2^7. A key of NaN
shows by its rotary part. Bytes that no insert writes, in a corrupt page, give infinity
or NaN: an exponent above 134 in decode, one of 255 in the gather, a NaN code in the
gather and in decode on CUDA. Decode on Intel GPUs takes a NaN code for 480, or -480,
times its scale: it has no registers left to look for one.
"""

import torch

from ._checks import check_dtype, check_inner_contiguous, fail

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
QUANT_BLOCK = 64
"""e4m3 values that share an exponent."""
MAX_EXPONENT = 134
TOKEN_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = 8
SLOT_BYTES = TOKEN_BYTES + SCALE_BYTES
PAGE_ALIGNMENT = 8


def check_pages(name: str, cache: torch.Tensor) -> None:
    """Raise unless `cache` holds FP8 pages, `[num_blocks, block_size, (1,) 584]` uint8.

    vLLM passes pages in this shape, or with an axis of one head before the last, as
    FlashMLA takes them. Only the block stride may be padded. Pages start at multiples
    of 8 bytes, so that one 64-bit load fetches the exponents of a token.

    Raises:
        ValueError: naming `name`, its value and what was expected.

    """
    check_dtype(name, cache, torch.uint8)
    width = SLOT_BYTES
    pages = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    if pages.dim() != 3 or pages.shape[2] != width or pages.shape[1] < 1:
        want = f"[num_blocks, block_size, (1,) {width}]"
        fail(f"{name}.shape", list(cache.shape), want)
    check_inner_contiguous(name, pages)
    if pages.shape[1] > 1 and pages.stride(1) != width:
        fail(f"{name}.stride(1)", pages.stride(1), f"{width}, dense tokens in a page")
    if pages.shape[0] > 1 and (
        pages.stride(0) % PAGE_ALIGNMENT or pages.stride(0) < pages.shape[1] * width
    ):
        fail(
            f"{name}.stride(0)",
            pages.stride(0),
            f"a multiple of {PAGE_ALIGNMENT}, at least {pages.shape[1] * width}",
        )
    if pages.device.type != "meta" and pages.data_ptr() % PAGE_ALIGNMENT:
        fail(
            f"{name}.data_ptr()",
            hex(pages.data_ptr()),
            f"a multiple of {PAGE_ALIGNMENT}",
        )


def page_bytes(block_size: int) -> int:
    """Bytes that `block_size` tokens occupy in a page, without padding."""
    return block_size * SLOT_BYTES


def check_page_cache(name: str, cache: torch.Tensor, block_size: int) -> None:
    """Raise unless `cache` holds uint8 pages of `block_size` tokens.

    Pages are `[num_blocks, page bytes]` or `[num_blocks, block_size, 584]`. The block
    stride may exceed the page, and must keep 4-byte words aligned.
    """
    check_dtype(name, cache, torch.uint8)
    if block_size < 1:
        fail("block_size", block_size, "at least 1")
    if cache.dim() not in (2, 3):
        fail(f"{name}.shape", list(cache.shape), "[blocks, bytes] or [blocks, *, 584]")
    check_inner_contiguous(name, cache)
    if cache.dim() == 3 and cache.shape[1] > 1 and cache.stride(1) != cache.shape[2]:
        fail(f"{name}.stride()", cache.stride(), "pages without gaps inside")
    if cache.dim() == 3 and cache.shape[1] != block_size:
        fail(f"{name}.shape", list(cache.shape), f"[blocks, {block_size}, 584]")
    inner = cache[0].numel() if cache.shape[0] else page_bytes(block_size)
    if inner < page_bytes(block_size):
        want = f"{page_bytes(block_size)} B per block"
        fail(f"{name}.shape", list(cache.shape), want)
    if cache.stride(0) % 4 and cache.shape[0] > 1:
        fail(f"{name}.stride(0)", cache.stride(0), "a multiple of 4")
    if cache.storage_offset() % 4:
        fail(f"{name}.storage_offset()", cache.storage_offset(), "a multiple of 4")
