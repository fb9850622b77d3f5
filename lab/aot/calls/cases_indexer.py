# SPDX-License-Identifier: Apache-2.0
"""Calls of the indexer: queries, logits, and the indices of the selected keys."""

from collections.abc import Iterator
from functools import partial

import torch

from lab.aot.calls.shapes import (
    CONTEXT,
    INDEX_DIM,
    INDEX_HEADS,
    MODELS,
    ROPE_DIM,
    WINDOW,
    Case,
    Sizes,
    call,
    f32,
    fp8,
    i32,
    i64,
    meta,
    op,
    u8,
)

INDEX_PAGE = 64
NEXT_N = (1, 2, 3, 4)
"""Tokens per request in a decode batch: one, and up to three speculative ones."""
ODD_WIDTH = 65
"""Compressed keys of a ratio-128 layer at a context of 8,320 tokens."""
BLOCKS = 4096
"""Blocks of the cache, and of the longest request: the same number by chance."""
IMAGE = 1024
"""Columns that an image adds in this report; any number compiles the same."""


def index_pages(blocks: int) -> torch.Tensor:
    """The indexer's key cache `[blocks, 64, 1, 132]`, block stride padded to 576."""
    width = INDEX_DIM + 4
    stride = -(-INDEX_PAGE * width // 576) * 576
    return meta(blocks, stride, dtype=u8).as_strided(
        (blocks, INDEX_PAGE, 1, width), (stride, width, width, 1)
    )


def context_lens(requests: int, next_n: int, last: bool) -> torch.Tensor:
    """One length per row, or only that of each request's last row."""
    return meta(requests, *(() if last else (next_n,)), dtype=i32)


def query_cases(sizes: Sizes) -> Iterator[Case]:
    """FP8 and MXFP4 queries."""
    for fp4 in (False, True):
        for tokens in (*sizes.tokens, *sizes.chunks):
            yield Case(
                "indexer_q",
                f"{'MXFP4' if fp4 else 'FP8'} T{tokens}",
                call(
                    "indexer.indexer_q",
                    "fused_indexer_q_rope_quant",
                    meta(tokens, dtype=i64),
                    meta(tokens, INDEX_HEADS, INDEX_DIM),
                    meta(65536, ROPE_DIM, dtype=f32),
                    meta(tokens, INDEX_HEADS),
                    INDEX_DIM**-0.5,
                    INDEX_HEADS**-0.5,
                    use_fp4=fp4,
                ),
            )


def logits(tokens: int, keys: int, first: int = 0, heads: int = INDEX_HEADS) -> None:
    """Indexer logits of a prefill chunk over gathered FP8 keys; the chunk begins at row
    `first` of its batch."""
    op("indexer.mqa_logits", "fp8_mqa_logits")(
        meta(tokens, heads, INDEX_DIM, dtype=fp8),
        meta(keys, INDEX_DIM, dtype=fp8),
        meta(keys, dtype=f32),
        meta(tokens, heads, dtype=f32),
        meta(first + tokens, dtype=i32)[first:],
        meta(first + tokens, dtype=i32)[first:],
    )


def paged_logits(
    requests: int,
    next_n: int,
    last: bool = False,
    blocks: int = BLOCKS,
    table_width: int = BLOCKS,
    heads: int = INDEX_HEADS,
) -> None:
    """Indexer logits of a decode batch over the paged FP8 keys."""
    op("indexer.mqa_logits", "fp8_paged_mqa_logits")(
        meta(requests, next_n, heads, INDEX_DIM, dtype=fp8),
        index_pages(blocks),
        meta(requests * next_n, heads, dtype=f32),
        context_lens(requests, next_n, last),
        meta(requests, table_width, dtype=i32),
        None,
        CONTEXT // 4,
    )


def logits_mxfp4(tokens: int, keys: int, first: int = 0) -> None:
    """Indexer logits of a prefill chunk over gathered MXFP4 keys, as `logits`."""
    op("indexer.mqa_logits_mxfp4", "mxfp4_mqa_logits")(
        meta(tokens, INDEX_HEADS, INDEX_DIM // 2, dtype=u8),
        meta(tokens, INDEX_HEADS, dtype=i32),
        meta(keys, INDEX_DIM // 2, dtype=u8),
        meta(keys, dtype=i32),
        meta(tokens, INDEX_HEADS, dtype=f32),
        meta(first + tokens, dtype=i32)[first:],
        meta(first + tokens, dtype=i32)[first:],
    )


def paged_logits_mxfp4(
    requests: int,
    next_n: int,
    last: bool = False,
    blocks: int = BLOCKS,
    table_width: int = BLOCKS,
) -> None:
    """Indexer logits of a decode batch over the paged MXFP4 keys, in pages of the size
    that v0.22.1 gives both formats."""
    width = INDEX_DIM // 2 + INDEX_DIM // 32
    pages = index_pages(blocks)
    pages = pages.as_strided(
        (*pages.shape[:3], width), (pages.stride(0), width, width, 1)
    )
    op("indexer.mqa_logits_mxfp4", "mxfp4_paged_mqa_logits")(
        meta(requests, next_n, INDEX_HEADS, INDEX_DIM // 2, dtype=u8),
        meta(requests, next_n, INDEX_HEADS, dtype=i32),
        pages,
        meta(requests * next_n, INDEX_HEADS, dtype=f32),
        context_lens(requests, next_n, last),
        meta(requests, table_width, dtype=i32),
        None,
        CONTEXT // 4,
    )


def logits_cases(sizes: Sizes) -> Iterator[Case]:
    """Logits of prefill chunks and of decode batches, over FP8 and MXFP4 keys."""
    for name, flat, paged in (
        ("FP8", logits, paged_logits),
        ("MXFP4", logits_mxfp4, paged_logits_mxfp4),
    ):
        for tokens in sizes.chunks:
            yield Case(
                "logits",
                f"prefill {name} T{tokens}",
                partial(flat, tokens, 65536),
            )
        for next_n in NEXT_N:
            for requests in sizes.requests:
                for last in (False, True):
                    yield Case(
                        "logits",
                        f"paged {name} R{requests} n{next_n}"
                        + (", last lengths" if last else ""),
                        partial(paged, requests, next_n, last),
                    )


def global_topk(tokens: int, topk: int) -> None:
    """Convert selected positions to cache slots."""
    op("indexer.topk_indices", "compute_global_topk_indices_and_lens")(
        meta(tokens, topk, dtype=i32),
        meta(tokens, dtype=i32),
        meta(16, 4096, dtype=i32),
        64,
        meta(tokens, dtype=torch.bool),
    )


def combine(requests: int, ratio: int, topk: int, image: int = 0) -> None:
    """Convert selected positions and the window to rows of the gathered buffer."""
    visible = meta(2048, dtype=i32) if image else None
    op("indexer.topk_indices", "combine_topk_swa_indices")(
        meta(2048, topk, dtype=i32),
        meta(requests + 1, dtype=i32),
        meta(requests, dtype=i32),
        meta(requests, dtype=i32),
        WINDOW,
        ratio,
        topk,
        topk + 4096,
        topk,
        None,
        visible,
        visible,
        image,
    )


def odd_combine() -> None:
    """The conversion where ratio-128 layers have a width of no multiple of 16."""
    combine(16, 128, ODD_WIDTH)


def topk_cases(sizes: Sizes) -> Iterator[Case]:
    """The conversions of decode and of prefill."""
    for model in MODELS:
        for tokens in (*sizes.tokens, *sizes.chunks):
            yield Case(
                "topk",
                f"{model.name} global T{tokens}",
                partial(global_topk, tokens, model.topk),
            )
        for ratio, topk in ((4, model.topk), (128, CONTEXT // 128)):
            for requests in sizes.requests:
                yield Case(
                    "topk",
                    f"{model.name} combine ratio {ratio} R{requests}",
                    partial(combine, requests, ratio, topk),
                )
        yield Case(
            "topk",
            f"{model.name} combine ratio 4 with images",
            partial(combine, 16, 4, model.topk, IMAGE),
        )
    yield Case("topk", f"combine ratio 128, {ODD_WIDTH} keys", odd_combine)
