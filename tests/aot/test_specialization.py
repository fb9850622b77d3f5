# SPDX-License-Identifier: Apache-2.0
"""What changes from step to step compiles nothing anew."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from aot import cases_attention, cases_indexer, cases_layer
from aot.record import recording
from aot.shapes import (
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    ROPE_DIM,
    WINDOW,
    f32,
    i32,
    i64,
    meta,
    op,
    pages,
    u8,
)

FLASH = cases_layer.MODELS[0]
STEPS, MOST_TOKENS, MOST_ROWS = 1000, 512, 70_000


def step(draw: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    """The kernels of one step of Flash, by the kind of layer that calls them."""
    tokens = draw.choice((1, 2, draw.randint(1, MOST_TOKENS)))
    keys = draw.choice((1, 16, draw.randint(1, MOST_ROWS)))
    requests = draw.randint(1, 64)
    compressed = draw.choice((1, 16, draw.randint(1, 8192)))
    for kind, topk, block in (
        ("window", 0, 64),
        ("ratio 4", FLASH.topk, 64),
        ("ratio 128", compressed, 2),
    ):
        yield (
            f"decode {kind}",
            lambda k=topk, b=block: cases_attention.decode(64, tokens, k, b),
        )
    yield "prefill", lambda: cases_attention.prefill(64, tokens, compressed + WINDOW)
    yield (
        "gather",
        lambda: op("gather", "dequantize_and_gather_k_cache")(
            meta(requests, keys, HEAD_DIM),
            pages(64),
            meta(requests, dtype=i32),
            meta(requests, dtype=i32),
            meta(requests, 4096, dtype=i32),
            64,
            min(draw.randint(0, 3), keys - 1),
        ),
    )
    yield (
        "insert",
        lambda: op("qnorm_rope_kv_insert", "xpu_qnorm_rope_kv_fp8_insert")(
            meta(tokens, 64, HEAD_DIM),
            meta(tokens, HEAD_DIM),
            pages(64),
            meta(draw.randint(1, tokens), dtype=i64),
            meta(tokens, dtype=i64),
            meta(65536, ROPE_DIM, dtype=f32),
            1e-6,
            64,
        ),
    )
    rotated = (meta(tokens, 64, HEAD_DIM), meta(tokens, dtype=i64))
    table = meta(65536, ROPE_DIM, dtype=f32)
    for name in ("inv_rope_bf16", "inv_rope_fp8_quant"):
        yield name, lambda n=name: op("inv_rope", n)(*rotated, table, 8, 8)
    yield (
        "global top-k",
        lambda: op("topk_indices", "compute_global_topk_indices_and_lens")(
            meta(tokens, FLASH.topk, dtype=i32),
            meta(tokens, dtype=i32),
            meta(requests, 4096, dtype=i32),
            64,
            meta(tokens, dtype=torch.bool),
        ),
    )
    yield (
        "combine",
        lambda: op("topk_indices", "combine_topk_swa_indices")(
            meta(tokens, compressed, dtype=i32),
            meta(requests + 1, dtype=i32),
            meta(requests, dtype=i32),
            meta(requests, dtype=i32),
            WINDOW,
            4,
            compressed,
            keys + compressed,
            compressed,
        ),
    )
    yield "logits", lambda: cases_indexer.logits_mxfp4(tokens, keys)
    yield "paged logits", lambda: cases_indexer.paged_logits_mxfp4(requests, 1)
    yield (
        "queries",
        lambda: op("indexer_q", "fused_indexer_q_rope_quant")(
            meta(tokens, dtype=i64),
            meta(tokens, INDEX_HEADS, INDEX_DIM),
            table,
            meta(tokens, INDEX_HEADS),
            INDEX_DIM**-0.5,
            INDEX_HEADS**-0.5,
            use_fp4=True,
        ),
    )
    streams = meta(tokens, 4, FLASH.hidden)
    gates = cases_layer.gates(FLASH)
    yield "mhc pre", lambda: op("mhc", "mhc_pre")(streams, *gates)
    yield (
        "mhc fused",
        lambda: op("mhc", "mhc_fused_post_pre")(
            meta(tokens, FLASH.hidden),
            streams,
            meta(tokens, 4, 1, dtype=f32),
            meta(tokens, 4, 4, dtype=f32),
            *gates,
        ),
    )
    yield (
        "nvfp4",
        lambda: op("nvfp4_linear", "nvfp4_linear")(
            meta(tokens, FLASH.hidden),
            meta(2048, FLASH.hidden // 2, dtype=u8),
            meta(2048, FLASH.hidden // 16, dtype=cases_layer.fp8),
            meta(dtype=f32),
        ),
    )


def test_a_thousand_steps_compile_each_kernel_at_most_four_times() -> None:
    draw = random.Random(4)
    compiled: dict[tuple[str, str], set[str]] = defaultdict(set)
    for _ in range(STEPS):
        for kind, call in step(draw):
            with recording() as launches:
                call()
            for launch in launches:
                specialized = (
                    sorted(launch.signature.items()),
                    sorted((at, str(to)) for at, to in launch.constants.items()),
                    sorted(launch.attributes.items()),
                    launch.num_warps,
                    launch.num_stages,
                    launch.grf,
                )
                compiled[kind, launch.name].add(str(specialized))
    assert len(compiled) >= 18
    most = {name: len(found) for name, found in compiled.items() if len(found) > 4}
    assert not most
