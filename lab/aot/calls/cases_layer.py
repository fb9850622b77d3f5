# SPDX-License-Identifier: Apache-2.0
"""Calls around attention: hyper-connections, the compressor, and the inverse RoPE of
attention's output."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lab.aot.calls.shapes import (
    CONTEXT,
    GROUP_HEADS,
    HEAD_DIM,
    MODELS,
    ROPE_DIM,
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
    u8,
)
from lab.memory_v41 import FLASH_V41

COMPRESSED = 2048
"""Columns of a ratio-4 compressor's projection: two of 512 for values and scores."""
STATE_BLOCKS = {4: 4, 128: 8}
"""Ratio -> tokens per block of the compressor's states."""
ENTRY_PAGES = {4: 64, 128: 2}
"""Ratio -> entries per page of 256 tokens."""


def gates(width: int) -> tuple[Any, ...]:
    """The constant arguments of MHC's pre part, from `fn` of `width` columns on."""
    return (
        meta(24, width, dtype=f32),
        meta(3, dtype=f32),
        meta(24, dtype=f32),
        1e-6,
        1e-6,
        1e-6,
        2.0,
        20,
    )


def mhc_cases(sizes: Sizes) -> Iterator[Case]:
    """Both models' hidden sizes."""
    for model in MODELS:
        for tokens in (*sizes.tokens, *sizes.chunks):
            streams = meta(tokens, 4, model.hidden)
            mixed = (
                meta(tokens, model.hidden),
                streams,
                meta(tokens, 4, 1, dtype=f32),
                meta(tokens, 4, 4, dtype=f32),
            )
            constants = gates(4 * model.hidden)
            norm = {"norm_weight": meta(model.hidden), "norm_eps": 1e-6}
            calls = {
                "pre": call("mhc.mhc", "mhc_pre", streams, *constants),
                "pre and norm": call("mhc.mhc", "mhc_pre", streams, *constants, **norm),
                "post": call("mhc.mhc", "mhc_post", *mixed),
                "fused": call("mhc.mhc", "mhc_fused_post_pre", *mixed, *constants),
                "fused and norm": call(
                    "mhc.mhc", "mhc_fused_post_pre", *mixed, *constants, **norm
                ),
                "head": call(
                    *("mhc.mhc_head", "hc_head", streams),
                    meta(4, 4 * model.hidden, dtype=f32),
                    meta(1, dtype=f32),
                    meta(4, dtype=f32),
                    1e-6,
                    1e-6,
                ),
            }
            for name, made in calls.items():
                yield Case("mhc", f"{model.name} {name} T{tokens}", made)


def delayed_calls(tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """DeepSeek-V4.1's hyper-connections: the model's entry, the entry of a later
    pipeline stage or behind Engram, and any other sublayer."""
    hidden = FLASH_V41.hidden
    x, streams = meta(tokens, hidden), meta(tokens, 4, hidden)
    mixes = meta(tokens, 4, 1, dtype=f32), meta(tokens, 4, 4, dtype=f32)
    carried = {"pre_mix": meta(tokens, 4, dtype=f32)}
    constants = gates(4 * hidden)
    for name, norm in (
        ("", {}),
        (" and norm", {"norm_weight": meta(hidden), "norm_eps": 1e-20}),
    ):
        module = "mhc.mhc_delayed"
        pre, fused = "mhc_pre_delayed", "mhc_fused_post_pre_delayed"
        yield (
            f"entry{name}",
            call(module, pre, streams, *gates(hidden), x=x, **norm),
        )
        yield f"pre{name}", call(module, pre, streams, *constants, **carried, **norm)
        yield (
            f"fused{name}",
            call(module, fused, x, streams, *mixes, *constants, **carried, **norm),
        )


def delayed_cases(sizes: Sizes) -> Iterator[Case]:
    """The hidden size of DeepSeek-V4.1-Flash."""
    for tokens in (*sizes.tokens, *sizes.chunks):
        for name, made in delayed_calls(tokens):
            yield Case("mhc", f"V4.1 {name} T{tokens}", made)


def inv_rope_cases(sizes: Sizes) -> Iterator[Case]:
    """bf16 for a plain product, blocks of FP8 with scales by columns or rows."""
    for label, count in sizes.heads:
        if count % GROUP_HEADS:
            continue
        for tokens in (*sizes.tokens, *sizes.chunks):
            arguments = (
                meta(tokens, count, HEAD_DIM),
                meta(tokens, dtype=i64),
                meta(65536, ROPE_DIM, dtype=f32),
                count // GROUP_HEADS,
                GROUP_HEADS,
            )
            for form, name in (
                ("bf16", "inv_rope_bf16"),
                ("FP8", "inv_rope_fp8_quant"),
            ):
                yield Case(
                    "inv_rope",
                    f"{label} H{count} {form} T{tokens}",
                    call("mla.inv_rope", name, *arguments),
                )


def compress(
    ratio: int,
    tokens: int,
    *,
    requests: int = 16,
    blocks: int = 4096,
    width: int | None = None,
) -> object:
    """The compressor of one ratio over `tokens`, with norm weights in bf16."""
    overlap = ratio == 4
    states = meta(blocks, STATE_BLOCKS[ratio], 2 * (1 + overlap) * HEAD_DIM, dtype=f32)
    return op("kv.compressor", "compress_norm_rope_insert")(
        states,
        meta(tokens, dtype=i32),
        meta(tokens, dtype=i64),
        meta(tokens, dtype=i64),
        meta(requests, width or CONTEXT // STATE_BLOCKS[ratio], dtype=i32),
        meta(HEAD_DIM),
        1e-6,
        meta(65536, ROPE_DIM, dtype=f32),
        pages(ENTRY_PAGES[ratio]),
        meta(tokens, dtype=i64),
        ratio,
        overlap,
    )


def compressor_cases(sizes: Sizes) -> Iterator[Case]:
    """Both ratios."""
    for ratio in STATE_BLOCKS:
        for tokens in (*sizes.tokens, *sizes.chunks):
            yield Case(
                "compressor",
                f"ratio {ratio} T{tokens}",
                partial(compress, ratio, tokens),
            )


def nvfp4_cases(sizes: Sizes) -> Iterator[Case]:
    """The compressor's projection with NVFP4 weights."""
    for model in MODELS:
        for tokens in (*sizes.tokens, *sizes.chunks):
            yield Case(
                "nvfp4",
                f"{model.name} T{tokens}",
                call(
                    *("linear.nvfp4_linear", "nvfp4_linear"),
                    meta(tokens, model.hidden),
                    meta(COMPRESSED, model.hidden // 2, dtype=u8),
                    meta(COMPRESSED, model.hidden // 16, dtype=fp8),
                    meta(dtype=f32),
                ),
            )


def mxfp8_calls(tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Rows of V4.1's attention: its input, the groups' product of wo_a over 8, 4, 2 and
    1 ranks, and the norms of queries and keys."""
    module, rows = "linear.mxfp8_quant", meta(tokens, FLASH_V41.hidden)
    yield "input", call(module, "mxfp8_quantize", rows)
    for groups in (1, 2, 4, 8):
        product = meta(groups, tokens, FLASH_V41.o_lora).transpose(0, 1)
        yield f"{groups} groups", call(module, "mxfp8_quantize", product)
    rank = FLASH_V41.q_lora
    latents = meta(tokens, rank + HEAD_DIM).split([rank, HEAD_DIM], dim=-1)
    weights = meta(rank), meta(HEAD_DIM)
    yield "norms", call(module, "q_kv_norm_mxfp8", *latents, *weights, 1e-20)


def mxfp8_cases(sizes: Sizes) -> Iterator[Case]:
    """DeepSeek-V4.1-Flash."""
    for tokens in (*sizes.tokens, *sizes.chunks):
        for name, made in mxfp8_calls(tokens):
            yield Case("mxfp8", f"V4.1 {name} T{tokens}", made)
