# SPDX-License-Identifier: Apache-2.0
"""The calls that ship: every public op at DeepSeek-V4's shapes, on `meta` tensors.

Flash has 64 attention heads and hidden size 4096, Pro 128 and 7168; tensor parallelism
of 1, 2, 4 or 8 divides the heads, and nothing else that a kernel sees. Each case calls
the public wrapper as vLLM does, so the wrapper itself chooses the configuration.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

HEAD_DIM = 512
ROPE_DIM = 64
WINDOW = 128
INDEX_HEADS, INDEX_DIM = 64, 128
CONTEXT = 1 << 20
PAGE_BYTES = {2: 1728, 64: 37440, 256: 149760}
"""Bytes from one page to the next by tokens a page: 584 a token, padded."""
PACKAGE = "kernels.xpu_dsv4"

bf16, f32, u8 = torch.bfloat16, torch.float32, torch.uint8
i32, i64, fp8 = torch.int32, torch.int64, torch.float8_e4m3fn


@dataclass(frozen=True)
class Model:
    """What a kernel's shape depends on.

    Attributes:
        name: of the model.
        heads: attention heads.
        hidden: hidden size.
        topk: compressed entries that the indexer selects a token.
        groups: output projection groups.
    """

    name: str
    heads: int
    hidden: int
    topk: int
    groups: int


MODELS = (
    Model("Flash", 64, 4096, 512, 8),
    Model("Pro", 128, 7168, 1024, 16),
)
PARALLEL = (1, 2, 4, 8)
TOKENS = (1, 16, 128)


@dataclass(frozen=True)
class Case:
    """One call: the op it belongs to, a label of its shape, and the call itself."""

    op: str
    label: str
    call: Callable[[], Any]


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def pages(block_size: int, blocks: int = 4096) -> torch.Tensor:
    """An FP8 page cache `[blocks, block_size, 584]` with vLLM's padded block stride."""
    flat = meta(blocks, PAGE_BYTES[block_size], dtype=u8)
    return flat.as_strided((blocks, block_size, 584), (PAGE_BYTES[block_size], 584, 1))


def op(module: str, name: str) -> Callable[..., Any]:
    """A public function of the kernels, imported when a case runs."""
    return getattr(import_module(f"{PACKAGE}.{module}"), name)


def heads() -> Iterator[tuple[str, Model, int]]:
    """(label, model, heads of one rank) for every model and tensor-parallel size."""
    for model in MODELS:
        for parallel in PARALLEL:
            yield f"{model.name} TP{parallel}", model, model.heads // parallel


def decode(q_heads: int, tokens: int, topk: int, topk_block: int) -> None:
    """Sparse decode; `topk` of 0 is a layer with a window only."""
    q, out = meta(tokens, q_heads, HEAD_DIM), meta(tokens, q_heads, HEAD_DIM)
    op("sparse_decode", "xpu_sparse_decode_fp8")(
        q,
        pages(topk_block) if topk else None,
        pages(64),
        not topk,
        meta(tokens, 1, topk, dtype=i32) if topk else None,
        meta(tokens, dtype=i32) if topk else None,
        meta(tokens, 1, WINDOW, dtype=i32),
        meta(tokens, dtype=i32),
        meta(q_heads, dtype=f32),
        HEAD_DIM**-0.5,
        HEAD_DIM,
        HEAD_DIM - ROPE_DIM,
        ROPE_DIM,
        out,
    )


def decode_cases() -> Iterator[Case]:
    for label, model, count in heads():
        for tokens in TOKENS:
            for kind, topk, block in (
                ("window", 0, 64),
                ("ratio 4", model.topk, 64),
                ("ratio 128", CONTEXT // 128, 2),
            ):
                yield Case(
                    "decode",
                    f"{label} H{count} {kind} T{tokens}",
                    lambda c=count, t=tokens, k=topk, b=block: decode(c, t, k, b),
                )


def prefill(q_heads: int, tokens: int, keys: int) -> None:
    """Sparse prefill over gathered bf16 KV."""
    op("sparse_prefill", "triton_bf16_mla_sparse_interface")(
        meta(tokens, q_heads, HEAD_DIM),
        meta(65536, 1, HEAD_DIM),
        meta(tokens, 1, keys, dtype=i32),
        HEAD_DIM**-0.5,
        d_v=HEAD_DIM,
        block_dpe=0,
        attn_sink=meta(q_heads, dtype=f32),
        topk_length=meta(tokens, dtype=i32),
        out=meta(tokens, q_heads, HEAD_DIM),
    )


def prefill_cases() -> Iterator[Case]:
    for label, model, count in heads():
        for kind, keys in (
            ("window", WINDOW),
            ("ratio 4", model.topk + WINDOW),
            ("ratio 128", CONTEXT // 128 + WINDOW),
        ):
            yield Case(
                "prefill",
                f"{label} H{count} {kind}",
                lambda c=count, k=keys: prefill(c, 2048, k),
            )


def insert_cases() -> Iterator[Case]:
    for label, _, count in heads():
        yield Case(
            "insert",
            f"{label} H{count}",
            lambda c=count: op("qnorm_rope_kv_insert", "xpu_qnorm_rope_kv_fp8_insert")(
                meta(16, c, HEAD_DIM),
                meta(16, HEAD_DIM),
                pages(64),
                meta(16, dtype=i64),
                meta(16, dtype=i64),
                meta(65536, ROPE_DIM, dtype=f32),
                1e-6,
                64,
            ),
        )
    for block in PAGE_BYTES:
        yield Case(
            "insert",
            f"K only, {block} tokens a page",
            lambda b=block: op("kv_quant", "quantize_and_insert_k_cache")(
                meta(16, HEAD_DIM),
                meta(4096, PAGE_BYTES[b], dtype=u8),
                meta(16, dtype=i64),
                block_size=b,
            ),
        )


def gather_cases() -> Iterator[Case]:
    for block in PAGE_BYTES:
        yield Case(
            "gather",
            f"slots, {block} tokens a page",
            lambda b=block: op("gather", "dequant_gather_slots")(
                meta(10240, HEAD_DIM), pages(b), meta(10240, dtype=i32), b
            ),
        )
        for lens in (None, meta(16, dtype=i32)):
            yield Case(
                "gather",
                f"requests, {block} tokens a page"
                + (", last rows" if lens is not None else ""),
                lambda b=block, n=lens: op("gather", "dequantize_and_gather_k_cache")(
                    meta(16, 8192, HEAD_DIM),
                    pages(b),
                    meta(16, dtype=i32),
                    n,
                    meta(16, CONTEXT // b, dtype=i32),
                    b,
                    0,
                ),
            )


def indexer_cases() -> Iterator[Case]:
    for fp4 in (False, True):
        for tokens in (16, 2048):
            yield Case(
                "indexer_q",
                f"{'MXFP4' if fp4 else 'FP8'} T{tokens}",
                lambda f=fp4, t=tokens: op("indexer_q", "fused_indexer_q_rope_quant")(
                    meta(t, dtype=i64),
                    meta(t, INDEX_HEADS, INDEX_DIM),
                    meta(65536, ROPE_DIM, dtype=f32),
                    meta(t, INDEX_HEADS),
                    INDEX_DIM**-0.5,
                    INDEX_HEADS**-0.5,
                    use_fp4=f,
                ),
            )


def logits(tokens: int, keys: int) -> None:
    """Indexer logits of a prefill chunk over gathered FP8 keys."""
    op("mqa_logits", "fp8_mqa_logits")(
        meta(tokens, INDEX_HEADS, INDEX_DIM, dtype=fp8),
        meta(keys, INDEX_DIM, dtype=fp8),
        meta(keys, dtype=f32),
        meta(tokens, INDEX_HEADS, dtype=f32),
        meta(tokens, dtype=i32),
        meta(tokens, dtype=i32),
    )


def paged_logits(requests: int, next_n: int, block: int = 64) -> None:
    """Indexer logits of a decode batch over the paged FP8 keys."""
    op("mqa_logits", "fp8_paged_mqa_logits")(
        meta(requests, next_n, INDEX_HEADS, INDEX_DIM, dtype=fp8),
        index_pages(block),
        meta(requests * next_n, INDEX_HEADS, dtype=f32),
        meta(requests, next_n, dtype=i32),
        meta(requests, CONTEXT // 4 // block, dtype=i32),
        None,
        CONTEXT // 4,
    )


def logits_mxfp4(tokens: int, keys: int) -> None:
    """Indexer logits of a prefill chunk over gathered MXFP4 keys."""
    op("mqa_logits_mxfp4", "mxfp4_mqa_logits")(
        meta(tokens, INDEX_HEADS, INDEX_DIM // 2, dtype=u8),
        meta(tokens, INDEX_HEADS, dtype=i32),
        meta(keys, INDEX_DIM // 2, dtype=u8),
        meta(keys, dtype=i32),
        meta(tokens, INDEX_HEADS, dtype=f32),
        meta(tokens, dtype=i32),
        meta(tokens, dtype=i32),
    )


def paged_logits_mxfp4(requests: int, next_n: int, block: int = 64) -> None:
    """Indexer logits of a decode batch over the paged MXFP4 keys, in pages of the size
    that v0.22.1 gives both formats."""
    width = INDEX_DIM // 2 + INDEX_DIM // 32
    stride = index_pages(block).stride(0)
    pages = index_pages(block).as_strided(
        (4096, block, 1, width), (stride, width, width, 1)
    )
    op("mqa_logits_mxfp4", "mxfp4_paged_mqa_logits")(
        meta(requests, next_n, INDEX_HEADS, INDEX_DIM // 2, dtype=u8),
        meta(requests, next_n, INDEX_HEADS, dtype=i32),
        pages,
        meta(requests * next_n, INDEX_HEADS, dtype=f32),
        meta(requests, next_n, dtype=i32),
        meta(requests, CONTEXT // 4 // block, dtype=i32),
        None,
        CONTEXT // 4,
    )


def index_pages(block: int, blocks: int = 4096) -> torch.Tensor:
    """The indexer's key cache `[blocks, block, 1, 132]`, block stride padded to 576."""
    stride = -(-block * (INDEX_DIM + 4) // 576) * 576
    return meta(blocks, stride, dtype=u8).as_strided(
        (blocks, block, 1, INDEX_DIM + 4), (stride, INDEX_DIM + 4, INDEX_DIM + 4, 1)
    )


def logits_cases() -> Iterator[Case]:
    for tokens in (16, 2048):
        yield Case("logits", f"prefill T{tokens}", lambda t=tokens: logits(t, 65536))
    yield Case("logits", "prefill MXFP4 T2048", lambda: logits_mxfp4(2048, 65536))
    for next_n in (1, 2):
        yield Case(
            "logits",
            f"paged MXFP4 B128 n{next_n}",
            lambda n=next_n: paged_logits_mxfp4(128, n),
        )
    for next_n in (1, 2, 4):
        for requests in (1, 128):
            yield Case(
                "logits",
                f"paged B{requests} n{next_n}",
                lambda r=requests, n=next_n: paged_logits(r, n),
            )


def topk_cases() -> Iterator[Case]:
    for model in MODELS:
        for tokens in (16, 2048):
            yield Case(
                "topk",
                f"{model.name} global T{tokens}",
                lambda m=model, t=tokens: op(
                    "topk_indices", "compute_global_topk_indices_and_lens"
                )(
                    meta(t, m.topk, dtype=i32),
                    meta(t, dtype=i32),
                    meta(16, 4096, dtype=i32),
                    64,
                    meta(t, dtype=torch.bool),
                ),
            )
        for ratio, topk in ((4, model.topk), (128, CONTEXT // 128)):
            for requests in (1, 16):
                yield Case(
                    "topk",
                    f"{model.name} combine ratio {ratio} R{requests}",
                    lambda n=topk, r=ratio, b=requests: op(
                        "topk_indices", "combine_topk_swa_indices"
                    )(
                        meta(2048, n, dtype=i32),
                        meta(b + 1, dtype=i32),
                        meta(b, dtype=i32),
                        meta(b, dtype=i32),
                        WINDOW,
                        r,
                        n,
                        n + 4096,
                        n,
                    ),
                )


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


def mhc_cases() -> Iterator[Case]:
    for model in MODELS:
        for tokens in (*TOKENS, 2048):

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
                "head": lambda s=streams, m=model: op("mhc", "hc_head")(
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


def inv_rope_cases() -> Iterator[Case]:
    for label, model, count in heads():
        groups = max(1, model.groups * count // model.heads)
        arguments = (groups, count // groups)
        for tokens in (16, 2048):

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
            for row_major in (False, True):
                yield Case(
                    "inv_rope",
                    f"{label} H{count} FP8 T{tokens}"
                    + (" row-major scales" if row_major else ""),
                    lambda i=inputs, a=arguments, r=row_major: op(
                        "inv_rope", "fused_inv_rope_fp8_quant"
                    )(*i(), *a, row_major_scales=r),
                )


GROUPS: tuple[Callable[[], Iterator[Case]], ...] = (
    decode_cases,
    prefill_cases,
    insert_cases,
    gather_cases,
    indexer_cases,
    logits_cases,
    topk_cases,
    mhc_cases,
    inv_rope_cases,
)


def cases() -> list[Case]:
    """All calls that ship."""
    return [case for group in GROUPS for case in group()]
