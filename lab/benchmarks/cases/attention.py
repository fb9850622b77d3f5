# SPDX-License-Identifier: Apache-2.0
"""Decode over FP8 pages and prefill over gathered bf16 keys."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from kernels.xpu_dsv4.mla.sparse_decode import (
    sparse_decode_workspace_size,
    xpu_sparse_decode_fp8,
)
from kernels.xpu_dsv4.mla.sparse_prefill import xpu_sparse_prefill

from ..files import ATTENTION, DECODE
from ..workload import FLASHMLA, OURS, TORCH, UPSTREAM, Candidate, Case, Competitors

DIM, NOPE, ROPE = 512, 448, 64
WINDOW, BLOCK, PAGE = 128, 64, 37440
TOKEN_BYTES = 584
SCALE = DIM**-0.5


def random_pages(blocks: int, device: torch.device) -> torch.Tensor:
    """FP8 pages `[blocks, 64, 584]` of about N(0, 1) values, block stride padded."""
    flat = torch.zeros(blocks, PAGE, dtype=torch.uint8, device=device)
    data = flat[:, : BLOCK * 576].view(blocks, BLOCK, 576)
    values = torch.randn(blocks, BLOCK, NOPE, device=device) * 100
    values.clamp_(-448, 448)
    data[..., :NOPE] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(blocks, BLOCK, ROPE, device=device).bfloat16()
    data[..., NOPE:] = rope.view(torch.uint8)
    scales = flat[:, BLOCK * 576 : BLOCK * TOKEN_BYTES].view(blocks, BLOCK, 8)
    scales[..., :7] = torch.randint(
        119, 122, (blocks, BLOCK, 7), dtype=torch.uint8, device=device
    )
    return flat.as_strided((blocks, BLOCK, TOKEN_BYTES), (PAGE, TOKEN_BYTES, 1))


def dequantize(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys `[..., 512]` in fp32 of global slots, by torch alone."""
    flat = pages.as_strided((pages.shape[0], PAGE), (PAGE, 1))
    block, place = slots // BLOCK, slots % BLOCK
    span = torch.arange(576, device=slots.device)
    data = flat[block[..., None], place[..., None] * 576 + span]
    step = torch.arange(7, device=slots.device)
    codes = flat[block[..., None], BLOCK * 576 + place[..., None] * 8 + step]
    scale = torch.exp2(codes.float() - 127).repeat_interleave(64, -1)
    nope = data[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float() * scale
    rope = data[..., NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, rope), -1)


def attend(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """Attention of `[T, H, 512]` over `[T, K, 512]`, in the type of `kv`."""
    score = torch.einsum("thd,tkd->thk", q.to(kv.dtype), kv)
    score = SCALE * score.to(torch.promote_types(kv.dtype, torch.float32))
    if sink is not None:
        column = sink.to(score.dtype).view(1, -1, 1).expand(score.shape[0], -1, 1)
        score = torch.cat((score, column), -1)
    weight = torch.softmax(score, -1)[..., : kv.shape[1]]
    return torch.einsum("thk,tkd->thd", weight.to(kv.dtype), kv)


def by_rows(
    function: Callable[..., torch.Tensor], rows: int, step: int = 64
) -> torch.Tensor:
    """Concatenate `function(slice)` over slices of the tokens, to bound memory."""
    return torch.cat([function(slice(i, i + step)) for i in range(0, rows, step)])


def decode(
    tokens: int,
    heads: int,
    topk: int,
    competitors: Competitors,
    device: torch.device,
    sets: int,
) -> list[Candidate]:
    """Candidates for one decode batch over a compressed and a window cache."""
    blocks = 4096 if device.type != "cpu" else 16
    main, window = (random_pages(blocks, device) for _ in range(2))
    slots = blocks * BLOCK
    sink = torch.randn(heads, device=device) * 2
    q = torch.randn(sets, tokens, heads, DIM, device=device).bfloat16()
    indices = [
        torch.randint(slots, (sets, tokens, 1, k), device=device).int()
        for k in (topk, WINDOW)
    ]
    lens = [
        torch.full((tokens,), k, dtype=torch.int32, device=device)
        for k in (topk, WINDOW)
    ]
    out = torch.empty_like(q)

    def keys(rows: slice, dtype: torch.dtype, which: int = 0) -> torch.Tensor:
        return torch.cat(
            [
                dequantize(pages, part[which, rows, 0].long())
                for pages, part in zip((main, window), indices, strict=True)
            ],
            1,
        ).to(dtype)

    @cache
    def reference(with_sink: bool) -> torch.Tensor:
        return by_rows(
            lambda rows: attend(
                q[0, rows],
                keys(rows, torch.float64),
                sink if with_sink else None,
            ),
            tokens,
        )

    def arguments(i: int) -> tuple[Any, ...]:
        return (
            q[i],
            main,
            window,
            False,
            indices[0][i],
            lens[0],
            indices[1][i],
            lens[1],
            sink,
            SCALE,
            DIM,
            NOPE,
            ROPE,
            out[i],
        )

    size = sparse_decode_workspace_size(tokens, heads, topk + WINDOW)
    workspace = torch.empty(max(size, 1), dtype=torch.float32, device=device)
    candidates = [
        Candidate(
            OURS,
            [
                partial(xpu_sparse_decode_fp8, *arguments(i), workspace=workspace)
                for i in range(sets)
            ],
            lambda: out[0],
            lambda: reference(True),
        )
    ]
    module = competitors.upstream(DECODE)
    if module is not None:
        candidates.append(
            Candidate(
                UPSTREAM,
                [
                    partial(module.xpu_sparse_decode_fp8, *arguments(i))
                    for i in range(sets)
                ],
                lambda: out[0],
                lambda: reference(False),
                note="no sink, checked without",
            )
        )
    flashmla = competitors.flashmla()
    if flashmla is not None:
        candidates.append(
            _flashmla_decode(
                flashmla, q, main, window, indices, lens, sink, lambda: reference(True)
            )
        )

    def baseline(i: int) -> None:
        kv = keys(slice(None), torch.bfloat16, i)
        out[i] = attend(q[i], kv, sink).bfloat16()

    candidates.append(
        Candidate(
            TORCH,
            [partial(baseline, i) for i in range(min(sets, 2))],
            lambda: out[0],
            lambda: reference(True),
            tolerance=1e-2,
        )
    )
    return candidates


def _flashmla_decode(
    flashmla: object,
    q: torch.Tensor,
    main: torch.Tensor,
    window: torch.Tensor,
    indices: list[torch.Tensor],
    lens: list[torch.Tensor],
    sink: torch.Tensor,
    reference: Callable[[], torch.Tensor],
) -> Candidate:
    sets, tokens, heads, _ = q.shape
    padded = 64 if heads <= 64 else 128
    wide = torch.zeros(sets, tokens, 1, padded, DIM, dtype=q.dtype, device=q.device)
    wide[:, :, 0, :heads] = q
    sinks = torch.full((padded,), -torch.inf, device=q.device)
    sinks[:heads] = sink
    plan = flashmla.FlashMLASchedMeta()  # type: ignore[attr-defined]
    results: dict[int, torch.Tensor] = {}

    def call(i: int) -> None:
        results[i] = flashmla.flash_mla_with_kvcache(  # type: ignore[attr-defined]
            wide[i],
            window.unsqueeze(-2),
            None,
            None,
            DIM,
            plan,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=indices[1][i],
            attn_sink=sinks,
            extra_k_cache=main.unsqueeze(-2),
            extra_indices_in_kvcache=indices[0][i],
            topk_length=lens[1],
            extra_topk_length=lens[0],
        )[0]

    return Candidate(
        FLASHMLA,
        [partial(call, i) for i in range(sets)],
        lambda: results[0][:, 0, :heads],
        reference,
        capture=False,
        note="plan reused, not captured"
        + (f", heads padded to {padded}" if padded != heads else ""),
    )


def prefill(
    tokens: int,
    heads: int,
    keys: int,
    competitors: Competitors,
    device: torch.device,
    sets: int,
) -> list[Candidate]:
    """Candidates for one prefill chunk over gathered keys."""
    rows = 16384 if device.type != "cpu" else 512
    kv = torch.randn(rows, 1, DIM, device=device).bfloat16()
    sink = torch.randn(heads, device=device) * 2
    q = torch.randn(sets, tokens, heads, DIM, device=device).bfloat16()
    indices = torch.randint(rows, (sets, tokens, 1, keys), device=device).int()
    lens = torch.full((tokens,), keys, dtype=torch.int32, device=device)
    results: dict[int, torch.Tensor] = {}

    @cache
    def reference(with_sink: bool) -> torch.Tensor:
        return by_rows(
            lambda part: attend(
                q[0, part],
                kv[indices[0, part, 0].long(), 0].double(),
                sink if with_sink else None,
            ),
            tokens,
            32,
        )

    def put(i: int, call: Callable[[], torch.Tensor]) -> None:
        results[i] = call()

    def candidate(
        name: str,
        interface: Callable[..., torch.Tensor],
        with_sink: bool,
        note: str = "",
        **options: object,
    ) -> Candidate:
        return Candidate(
            name,
            [
                partial(
                    put, i, partial(interface, q[i], kv, indices[i], SCALE, **options)
                )
                for i in range(sets)
            ],
            lambda: results[0][:, :heads],
            lambda: reference(with_sink),
            note=note,
        )

    candidates = [
        candidate(
            OURS,
            xpu_sparse_prefill,
            True,
            attn_sink=sink,
            topk_length=lens,
        )
    ]
    module = competitors.upstream(ATTENTION)
    if module is not None:
        candidates.append(
            candidate(
                UPSTREAM,
                lambda *arguments, **options: (
                    module.triton_bf16_mla_sparse_interface(*arguments, **options)[0]
                ),
                False,
                "no sink, checked without",
                d_v=DIM,
                block_dpe=0,
            )
        )
    flashmla = competitors.flashmla()
    if flashmla is not None:
        padded = 64 if heads <= 64 else 128
        wide = torch.zeros(sets, tokens, padded, DIM, dtype=q.dtype, device=device)
        wide[:, :, :heads] = q
        sinks = torch.full((padded,), -torch.inf, device=device)
        sinks[:heads] = sink

        def run(i: int) -> None:
            results[i] = flashmla.flash_mla_sparse_fwd(
                wide[i],
                kv,
                indices[i],
                SCALE,
                d_v=DIM,
                attn_sink=sinks,
                topk_length=lens,
            )[0]

        candidates.append(
            Candidate(
                FLASHMLA,
                [partial(run, i) for i in range(sets)],
                lambda: results[0][:, :heads],
                lambda: reference(True),
                note=f"heads padded to {padded}" if padded != heads else "",
            )
        )

    def baseline(i: int) -> None:
        results[i] = by_rows(
            lambda part: attend(
                q[i, part], kv[indices[i, part, 0].long(), 0], sink
            ).bfloat16(),
            tokens,
            256,
        )

    candidates.append(
        Candidate(
            TORCH,
            [partial(baseline, 0)],
            lambda: results[0],
            lambda: reference(True),
            tolerance=1e-2,
        )
    )
    return candidates


SHAPES = ((16, 512), (64, 512), (128, 1024))
"""(heads, compressed keys): Flash at TP 4 and 1, Pro."""
LAST_WAVE = (200, 128, 1024)
"""A decode whose last wave of 64 heads has 4 programs on 132 multiprocessors."""
FEW_HEADS = (3000, 8, 512)
"""A prefill of Flash at TP 8."""


def cases(competitors: Competitors, device: torch.device) -> Iterator[Case]:
    """Decode, then prefill, at the shapes that count."""
    dry = device.type == "cpu"
    sets = 1 if dry else 8
    shapes = ((16, 64),) if dry else SHAPES
    sizes = (2,) if dry else (1, 4, 16, 64, 128)
    batches = [(tokens, *shape) for shape in shapes for tokens in sizes]
    for tokens, heads, topk in batches + ([] if dry else [LAST_WAVE]):
        keys = topk + WINDOW
        yield Case(
            "decode",
            tokens,
            heads,
            keys,
            tokens * (keys * TOKEN_BYTES + heads * DIM * 4),
            4 * tokens * heads * keys * DIM,
            partial(decode, tokens, heads, topk, competitors, device, sets),
        )
    lengths = (2,) if dry else (256, 2048)
    chunks = [(tokens, *shape) for shape in shapes for tokens in lengths]
    for tokens, heads, topk in chunks + ([] if dry else [FEW_HEADS]):
        keys = topk + WINDOW
        rows = min(tokens * keys, 16384)
        yield Case(
            "prefill",
            tokens,
            heads,
            keys,
            rows * DIM * 2 + tokens * (heads * DIM * 4 + keys * 4),
            4 * tokens * heads * keys * DIM,
            partial(prefill, tokens, heads, keys, competitors, device, min(sets, 2)),
        )
