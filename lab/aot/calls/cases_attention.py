# SPDX-License-Identifier: Apache-2.0
"""Calls of attention: decode, prefill, page insert and gather.

Each calls the public wrapper as vLLM does; the wrapper chooses the configuration.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lab.aot.calls.shapes import (
    CONTEXT,
    GROUP_HEADS,
    HEAD_DIM,
    MODELS,
    PAGE_BYTES,
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
    pages,
)

TOPK = max(model.topk for model in MODELS)
DECODE_LAYERS = (
    ("window", 0, 64),
    ("ratio 4", TOPK, 64),
    ("ratio 4, 256 per page", TOPK, 256),
    ("ratio 128", CONTEXT // 128, 2),
)
"""(name, compressed keys, compressed keys per page)."""
PREFILL_LAYERS = (
    ("window", WINDOW),
    ("ratio 4", TOPK + WINDOW),
    ("ratio 128", CONTEXT // 128 + WINDOW),
)


def output(q_heads: int, tokens: int, in_fp8: bool, first: int = 0) -> Any:
    """Where attention writes; a batch has `first` tokens before those of the call."""
    if not in_fp8:
        return meta(tokens, q_heads, HEAD_DIM)
    groups, width = q_heads // GROUP_HEADS, GROUP_HEADS * HEAD_DIM
    batch = first + tokens
    return op("mla._output", "Fp8Output")(
        meta(groups, batch, width, dtype=fp8),
        meta(groups, batch, width // 128, dtype=f32),
        meta(batch, dtype=i64),
        meta(65536, ROPE_DIM, dtype=f32),
    )[first:]


def decode(
    q_heads: int,
    tokens: int,
    topk: int,
    block: int,
    sink: bool = True,
    aligned: bool = True,
    in_fp8: bool = False,
) -> None:
    """Sparse decode; `topk` of 0 is a layer with a window only."""
    q = meta(tokens, q_heads, HEAD_DIM)
    if not aligned:
        q = meta(tokens, q_heads, HEAD_DIM + 1)[..., 1:]
    op("mla.sparse_decode", "xpu_sparse_decode_fp8")(
        q,
        pages(block) if topk else None,
        pages(64),
        not topk,
        meta(tokens, 1, topk, dtype=i32) if topk else None,
        meta(tokens, dtype=i32) if topk else None,
        meta(tokens, 1, WINDOW, dtype=i32),
        meta(tokens, dtype=i32),
        meta(q_heads, dtype=f32) if sink else None,
        HEAD_DIM**-0.5,
        HEAD_DIM,
        HEAD_DIM - ROPE_DIM,
        ROPE_DIM,
        output(q_heads, tokens, in_fp8),
    )


def output_forms(q_heads: int) -> tuple[str, ...]:
    """Labels of bf16, and of FP8 where a rank with so many heads has whole groups."""
    return ("",) if q_heads % GROUP_HEADS else ("", " to FP8")


def decode_cases(sizes: Sizes) -> Iterator[Case]:
    """Every kind of layer with the sink, which vLLM always passes; one without."""
    for label, count in sizes.heads:
        for tokens in sizes.tokens:
            for kind, topk, block in DECODE_LAYERS:
                for form in output_forms(count):
                    yield Case(
                        "decode",
                        f"{label} H{count} {kind} T{tokens}{form}",
                        partial(decode, count, tokens, topk, block, in_fp8=bool(form)),
                    )
    for tokens in (1, 1024):
        yield Case(
            "decode",
            f"H64 ratio 4 T{tokens} without sink",
            partial(decode, 64, tokens, TOPK, 64, sink=False),
        )


def prefill(
    q_heads: int,
    tokens: int,
    keys: int,
    sink: bool = True,
    lens: bool = True,
    aligned: bool = True,
    in_fp8: bool = False,
    first: int = 0,
    packed: bool = True,
) -> None:
    """Sparse prefill over gathered bf16 KV, whose rows have gaps unless `packed`."""
    q = meta(tokens, q_heads, HEAD_DIM)
    if not aligned:
        q = meta(tokens, q_heads, HEAD_DIM + 1)[..., 1:]
    op("mla.sparse_prefill", "xpu_sparse_prefill")(
        q,
        meta(65536, 1, HEAD_DIM if packed else HEAD_DIM + 16)[..., :HEAD_DIM],
        meta(tokens, 1, keys, dtype=i32),
        HEAD_DIM**-0.5,
        attn_sink=meta(q_heads, dtype=f32) if sink else None,
        topk_length=meta(tokens, dtype=i32) if lens else None,
        out=output(q_heads, tokens, in_fp8, first),
    )


def prefill_cases(sizes: Sizes) -> Iterator[Case]:
    """Every kind of layer; one without sink and lengths, one over rows with gaps."""
    for label, count in sizes.heads:
        for tokens in sizes.chunks:
            for kind, keys in PREFILL_LAYERS:
                for form in output_forms(count):
                    yield Case(
                        "prefill",
                        f"{label} H{count} {kind} T{tokens}{form}",
                        partial(prefill, count, tokens, keys, in_fp8=bool(form)),
                    )
    yield Case(
        "prefill",
        "H64 ratio 4 without sink and lengths",
        lambda: prefill(64, 2048, TOPK + WINDOW, sink=False, lens=False),
    )
    yield Case(
        "prefill",
        "H8 ratio 4 over rows with gaps",
        lambda: prefill(8, 2048, TOPK + WINDOW, packed=False),
    )


def unaligned_cases(sizes: Sizes) -> Iterator[Case]:
    """Queries that 2-dim block loads cannot read."""
    for label, count in sizes.heads:
        for tokens in (1, 1024):
            yield Case(
                "decode",
                f"{label} H{count} ratio 4 T{tokens} unaligned",
                partial(decode, count, tokens, TOPK, 64, aligned=False),
            )
        yield Case(
            "prefill",
            f"{label} H{count} ratio 4 T512 unaligned",
            partial(prefill, count, 512, TOPK + WINDOW, aligned=False),
        )


def insert(
    tokens: int, heads: int, page: int, eps: float, **form: bool
) -> Callable[[], object]:
    """The fused insert into pages of so many tokens."""
    return call(
        "kv.qnorm_rope_kv_insert",
        "xpu_qnorm_rope_kv_fp8_insert",
        meta(tokens, heads, HEAD_DIM),
        meta(tokens, HEAD_DIM),
        pages(page),
        meta(tokens, dtype=i64),
        meta(tokens, dtype=i64),
        meta(65536, ROPE_DIM, dtype=f32),
        eps,
        page,
        **form,
    )


def insert_cases(sizes: Sizes) -> Iterator[Case]:
    """The fused insert at every head count."""
    for label, count in sizes.heads:
        for tokens in (*sizes.tokens, *sizes.chunks):
            name = f"{label} H{count} T{tokens}"
            yield Case("insert", name, insert(tokens, count, 64, 1e-6))


def v41_insert_cases(sizes: Sizes) -> Iterator[Case]:
    """V4.1's insert, which leaves queries without a norm, into pages of its window."""
    for ranks, count in ((1, 64), (8, 8)):
        for tokens in (*sizes.tokens, *sizes.chunks):
            name = f"V4.1 TP{ranks} H{count} T{tokens}"
            yield Case("insert", name, insert(tokens, count, 32, 1e-20, norm_q=False))


def gather_cases(sizes: Sizes) -> Iterator[Case]:
    """By request: all rows, or the last ones."""
    for block in PAGE_BYTES:
        for requests in sizes.requests:
            for part in ("all", "last"):
                yield Case(
                    "gather",
                    f"{part} rows of R{requests}, {block} tokens per page",
                    call(
                        "kv.gather",
                        "dequantize_and_gather_k_cache",
                        meta(requests, 8192, HEAD_DIM),
                        pages(block),
                        meta(requests, dtype=i32),
                        meta(requests, dtype=i32) if part == "last" else None,
                        meta(requests, CONTEXT // block, dtype=i32),
                        block,
                        0,
                    ),
                )
