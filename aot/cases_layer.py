# SPDX-License-Identifier: Apache-2.0
"""Calls around attention: hyper-connections, and the inverse RoPE of its output."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .shapes import (
    HEAD_DIM,
    MODELS,
    ROPE_DIM,
    Case,
    Model,
    Sizes,
    f32,
    fp8,
    i64,
    meta,
    op,
    u8,
)

COMPRESSED = 2048
"""Columns of a ratio-4 compressor's projection: two of 512 for values and scores."""
GROUP_HEADS = 8
"""Heads of one group of the output projection; a rank holds whole groups."""


def gates(model: Model) -> tuple[Any, ...]:
    """The constant arguments of MHC's pre part, from `fn` on."""
    return (
        meta(24, 4 * model.hidden, dtype=f32),
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

            def streams(m: Model = model, t: int = tokens) -> torch.Tensor:
                return meta(t, 4, m.hidden)

            def mixed(m: Model = model, t: int = tokens) -> tuple[torch.Tensor, ...]:
                return (
                    meta(t, m.hidden),
                    meta(t, 4, m.hidden),
                    meta(t, 4, 1, dtype=f32),
                    meta(t, 4, 4, dtype=f32),
                )

            calls: dict[str, Callable[[], Any]] = {
                "pre": lambda s=streams, m=model: op("mhc", "mhc_pre")(s(), *gates(m)),
                "pre and norm": lambda s=streams, m=model: op("mhc", "mhc_pre")(
                    s(), *gates(m), norm_weight=meta(m.hidden), norm_eps=1e-6
                ),
                "post": lambda a=mixed: op("mhc", "mhc_post")(*a()),
                "fused": lambda a=mixed, m=model: op("mhc", "mhc_fused_post_pre")(
                    *a(), *gates(m)
                ),
                "fused and norm": lambda a=mixed, m=model: op(
                    "mhc", "mhc_fused_post_pre"
                )(*a(), *gates(m), norm_weight=meta(m.hidden), norm_eps=1e-6),
                "head": lambda s=streams, m=model: op("mhc_head", "hc_head")(
                    s(),
                    meta(4, 4 * m.hidden, dtype=f32),
                    meta(1, dtype=f32),
                    meta(4, dtype=f32),
                    1e-6,
                    1e-6,
                ),
            }
            for name, call in calls.items():
                yield Case("mhc", f"{model.name} {name} T{tokens}", call)


def inv_rope_cases(sizes: Sizes) -> Iterator[Case]:
    """bf16 for a plain product, blocks of FP8 with scales by columns or rows."""
    for label, count in sizes.heads:
        if count % GROUP_HEADS:
            continue
        for tokens in (*sizes.tokens, *sizes.chunks):
            arguments = (count // GROUP_HEADS, GROUP_HEADS)

            def inputs(c: int = count, t: int = tokens) -> tuple[torch.Tensor, ...]:
                return (
                    meta(t, c, HEAD_DIM),
                    meta(t, dtype=i64),
                    meta(65536, ROPE_DIM, dtype=f32),
                )

            yield Case(
                "inv_rope",
                f"{label} H{count} bf16 T{tokens}",
                lambda i=inputs, a=arguments: op("inv_rope", "inv_rope_bf16")(*i(), *a),
            )
            yield Case(
                "inv_rope",
                f"{label} H{count} FP8 T{tokens}",
                lambda i=inputs, a=arguments: op("inv_rope", "inv_rope_fp8_quant")(
                    *i(), *a
                ),
            )


def nvfp4_cases(sizes: Sizes) -> Iterator[Case]:
    """The compressor's projection with NVFP4 weights."""
    for model in MODELS:
        for tokens in (*sizes.tokens, *sizes.chunks):
            yield Case(
                "nvfp4",
                f"{model.name} T{tokens}",
                lambda m=model, t=tokens: op("nvfp4_linear", "nvfp4_linear")(
                    meta(t, m.hidden),
                    meta(COMPRESSED, m.hidden // 2, dtype=u8),
                    meta(COMPRESSED, m.hidden // 16, dtype=fp8),
                    meta(dtype=f32),
                ),
            )
