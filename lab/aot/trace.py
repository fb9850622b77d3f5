# SPDX-License-Identifier: Apache-2.0
"""The calls that serving makes, which aot records to know what Triton specializes.

What changes from step to step is drawn at random: 1, a multiple of 16, or anything. So
are the blocks that a server has room for, and where the rows of a chunk begin in the
vectors of its batch. Triton compiles these apart, unless a kernel says that it does not
care.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from kernels.xpu_dsv4 import _device
from lab.aot.calls import cases_attention, cases_experts, cases_indexer, cases_layer
from lab.aot.calls.cases import cases
from lab.aot.calls.record import LaunchRecord, record_cases
from lab.aot.calls.shapes import (
    GROUP_HEADS,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    MODELS,
    ROPE_DIM,
    SERVED,
    WINDOW,
    Case,
    call,
    f32,
    fp8,
    i32,
    i64,
    meta,
    pages,
    u8,
)
from lab.aot.costs.model import devices

FLASH = MODELS[0]
TRACE = 30
"""Steps that the gate records for each number of heads."""
MOST_TOKENS, MOST_ROWS, MOST_REQUESTS, MOST_BLOCKS = 512, 70_000, 64, 9_000
LONGEST_COMPRESSED = 8192
"""Compressed keys per token of a ratio-128 layer at a context of 1M tokens."""


def traced() -> list[LaunchRecord]:
    """What `SERVED` and a trace of steps launch, on each device of the cost model.

    How many programs share a token's keys depends on the Xe-cores of the device.
    """
    records = record_cases("ours", cases(SERVED))
    for _, heads in SERVED.heads:
        records += record_cases("ours", steps(TRACE, heads))
    for cores in sorted({device.xe_cores for device in devices()}):
        with mock.patch.object(_device, "xe_cores", return_value=cores):
            records += record_cases("ours", cases_attention.decode_cases(SERVED))
    return records


def steps(count: int, heads: int, seed: int = 4) -> Iterator[Case]:
    """The calls of `count` steps on a rank with `heads` heads.

    The op of a case names the kernel and the kind of layer that calls it, the label
    the rank and the step.
    """
    draw = random.Random(seed)
    for number in range(count):
        for kind, made in _step(draw, heads):
            yield Case(kind, f"H{heads} step {number}", made)


def _step(
    draw: random.Random, heads: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of one step. Everything is drawn before a call is made."""
    tokens = _some(draw, MOST_TOKENS)
    requests = _some(draw, MOST_REQUESTS)
    rows = _some(draw, MOST_ROWS)
    # The width of an index tensor does not change while a server runs.
    compressed = draw.randint(17, LONGEST_COMPRESSED)
    yield "decode window", partial(cases_attention.decode, heads, tokens, 0, 64)
    for kind, topk, block in (
        ("ratio 4", FLASH.topk, 64),
        ("ratio 128", compressed, 2),
    ):
        yield (
            f"decode {kind}",
            partial(cases_attention.decode, heads, tokens, topk, block),
        )
    yield (
        "prefill",
        partial(cases_attention.prefill, heads, tokens, compressed + WINDOW),
    )
    blocks = draw.randint(1, MOST_BLOCKS)
    # Of a batch's vectors and tables, a chunk of its prefills is a part.
    first = draw.randint(0, 7)
    table = meta(first + requests, draw.randint(2, MOST_BLOCKS), dtype=i32)[first:]
    offset = min(draw.randint(0, 3), rows - 1)
    for part in ("all", "last"):
        yield f"gather {part}", _gather(part, requests, rows, offset, blocks, table)
    yield "insert", _insert(heads, tokens, draw.randint(1, tokens))
    if heads % GROUP_HEADS == 0:
        yield from _inverse_rope(heads, tokens)
        for kind, topk, block in (("window", 0, 64), ("ratio 4", FLASH.topk, 64)):
            yield (
                f"decode {kind} to FP8",
                partial(
                    cases_attention.decode, heads, tokens, topk, block, in_fp8=True
                ),
            )
        yield (
            "prefill to FP8",
            partial(
                cases_attention.prefill,
                heads,
                tokens,
                compressed + WINDOW,
                in_fp8=True,
                first=first,
            ),
        )
    yield (
        "global top-k",
        call(
            "indexer.topk_indices",
            "compute_global_topk_indices_and_lens",
            meta(tokens, FLASH.topk, dtype=i32),
            meta(tokens, dtype=i32),
            meta(requests, table.shape[1], dtype=i32),
            64,
            meta(tokens, dtype=torch.bool),
        ),
    )
    for ratio, width in ((4, FLASH.topk), (128, compressed)):
        yield (
            f"combine ratio {ratio}",
            _combine(requests, first, tokens, ratio, width, rows),
        )
    width = table.shape[1]
    for name, flat, paged in (
        ("FP8", cases_indexer.logits, cases_indexer.paged_logits),
        ("MXFP4", cases_indexer.logits_mxfp4, cases_indexer.paged_logits_mxfp4),
    ):
        yield f"logits {name}", partial(flat, tokens, rows, first)
        yield f"paged logits {name}", partial(paged, requests, 1, False, blocks, width)
    yield (
        "queries",
        call(
            "indexer.indexer_q",
            "fused_indexer_q_rope_quant",
            meta(tokens, dtype=i64),
            meta(tokens, INDEX_HEADS, INDEX_DIM),
            meta(65536, ROPE_DIM, dtype=f32),
            meta(tokens, INDEX_HEADS),
            INDEX_DIM**-0.5,
            INDEX_HEADS**-0.5,
            use_fp4=True,
        ),
    )
    yield from _compress(tokens, requests, blocks, width)
    yield from _layer(tokens)


def _some(draw: random.Random, most: int) -> int:
    """1, 16, or a number up to `most`."""
    return draw.choice((1, 16, draw.randint(1, most)))


def _gather(
    part: str, requests: int, rows: int, offset: int, blocks: int, table: torch.Tensor
) -> Callable[[], object]:
    """All rows of each request, or as many of the last as `gather_lens` says."""
    return call(
        "kv.gather",
        "dequantize_and_gather_k_cache",
        meta(requests, rows, HEAD_DIM),
        pages(64, blocks),
        meta(requests + 1, dtype=i32)[1:],
        meta(requests + 1, dtype=i32)[1:] if part == "last" else None,
        table,
        64,
        offset,
    )


def _insert(heads: int, tokens: int, slots: int) -> Callable[[], object]:
    """A graph pads `tokens`; only the first `slots` have one."""
    return call(
        "kv.qnorm_rope_kv_insert",
        "xpu_qnorm_rope_kv_fp8_insert",
        meta(tokens, heads, HEAD_DIM),
        meta(tokens, HEAD_DIM),
        pages(64),
        meta(slots, dtype=i64),
        meta(tokens, dtype=i64),
        meta(65536, ROPE_DIM, dtype=f32),
        1e-6,
        64,
    )


def _inverse_rope(
    heads: int, tokens: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    for name in ("inv_rope_bf16", "inv_rope_fp8_quant"):
        yield (
            name,
            call(
                "mla.inv_rope",
                name,
                meta(tokens, heads, HEAD_DIM),
                meta(tokens, dtype=i64),
                meta(65536, ROPE_DIM, dtype=f32),
                heads // GROUP_HEADS,
                GROUP_HEADS,
            ),
        )


def _combine(
    requests: int, first: int, tokens: int, ratio: int, width: int, rows: int
) -> Callable[[], object]:
    """The prefills behind the first `first` requests of a batch."""
    return call(
        "indexer.topk_indices",
        "combine_topk_swa_indices",
        meta(tokens, width, dtype=i32),
        meta(first + requests + 1, dtype=i32)[first:],
        meta(first + requests, dtype=i32)[first:],
        meta(first + requests, dtype=i32)[first:],
        WINDOW,
        ratio,
        width,
        rows + width,
        width,
    )


def _compress(
    tokens: int, requests: int, blocks: int, width: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """A server has one number of state blocks and one width of their table."""
    for ratio in cases_layer.STATE_BLOCKS:
        yield (
            f"compressor ratio {ratio}",
            partial(
                cases_layer.compress,
                ratio,
                tokens,
                requests=requests,
                blocks=blocks,
                width=width,
            ),
        )


def _layer(tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The kernels that no number of heads concerns."""
    streams = meta(tokens, 4, FLASH.hidden)
    gates = cases_layer.gates(4 * FLASH.hidden)
    yield "mhc pre", call("mhc.mhc", "mhc_pre", streams, *gates)
    yield (
        "mhc fused",
        call(
            "mhc.mhc",
            "mhc_fused_post_pre",
            meta(tokens, FLASH.hidden),
            streams,
            meta(tokens, 4, 1, dtype=f32),
            meta(tokens, 4, 4, dtype=f32),
            *gates,
        ),
    )
    for name, made in cases_layer.delayed_calls(tokens):
        yield f"mhc delayed {name}", made
    for ranks in cases_experts.PARALLEL:
        for kind in ("tensor", "expert"):
            yield (
                f"experts, {ranks} {kind}-parallel",
                partial(
                    cases_experts.experts,
                    cases_experts.EXPERTS[0],
                    tokens,
                    **{kind: ranks},
                ),
            )
    for name, made in cases_layer.mxfp8_calls(tokens):
        yield f"mxfp8 {name}", made
    yield (
        "nvfp4",
        call(
            "linear.nvfp4_linear",
            "nvfp4_linear",
            meta(tokens, FLASH.hidden),
            meta(2048, FLASH.hidden // 2, dtype=u8),
            meta(2048, FLASH.hidden // 16, dtype=fp8),
            meta(dtype=f32),
        ),
    )
