# SPDX-License-Identifier: Apache-2.0
"""Attention that ends with the FP8 operands of wo_a's product, beside two launches."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from kernels.xpu_dsv4.mla.inv_rope import inv_rope_fp8_quant
from kernels.xpu_dsv4.mla.sparse_decode import (
    Fp8Output,
    sparse_decode_workspace_size,
    xpu_sparse_decode_fp8,
)
from kernels.xpu_dsv4.mla.sparse_prefill import xpu_sparse_prefill

from ..workload import OURS, TWO_LAUNCHES, Candidate, Case, Competitors
from .attention import (
    BLOCK,
    DIM,
    NOPE,
    ROPE,
    SCALE,
    SHAPES,
    TOKEN_BYTES,
    WINDOW,
    attend,
    by_rows,
    dequantize,
    random_pages,
)
from .layer import rotated

GROUP_HEADS, SCALE_DIMS = 8, 128
POSITIONS = 4096

Attention = Callable[[int, torch.Tensor | Fp8Output], object]
"""Attention of an input set, and where to."""


def candidates(
    tokens: int,
    heads: int,
    sets: int,
    device: torch.device,
    attention: Attention,
    reference: Callable[[], torch.Tensor],
) -> list[Candidate]:
    """One launch and two, for attention whose float64 result is `reference`."""
    groups, width = heads // GROUP_HEADS, GROUP_HEADS * DIM
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    angles = torch.rand(POSITIONS, ROPE // 2, device=device) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), -1)
    back = torch.cat((angles.cos(), -angles.sin()), -1)
    fused = Fp8Output(
        torch.empty((groups, tokens, width), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((groups, tokens, width // SCALE_DIMS), device=device),
        positions,
        table,
    )
    rows = torch.empty(tokens, heads, DIM, dtype=torch.bfloat16, device=device)
    separate: dict[str, torch.Tensor] = {}

    def two_launches(i: int) -> None:
        attention(i, rows)
        separate["values"], separate["scales"] = inv_rope_fp8_quant(
            rows, positions, table, groups, GROUP_HEADS, NOPE, ROPE
        )

    def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """fp32 `[T, H, 512]` of `[T, G, D]` codes and their scales."""
        factors = scales.repeat_interleave(SCALE_DIMS, -1)
        return (codes.float() * factors).reshape(tokens, heads, DIM)

    @cache
    def expected() -> torch.Tensor:
        return rotated(reference(), positions, back)

    def candidate(
        name: str, call: Callable[[int], Any], result: Callable[[], torch.Tensor]
    ) -> Candidate:
        return Candidate(
            name,
            [partial(call, i) for i in range(sets)],
            result,
            expected,
            tolerance=4e-2,
            note="FP8 output: loose bound",
        )

    return [
        candidate(
            OURS,
            lambda i: attention(i, fused),
            lambda: values(fused.values.transpose(0, 1), fused.scales.transpose(0, 1)),
        ),
        candidate(
            TWO_LAUNCHES,
            two_launches,
            lambda: values(separate["values"], separate["scales"]),
        ),
    ]


def decode(
    tokens: int, heads: int, topk: int, device: torch.device, sets: int
) -> list[Candidate]:
    """Candidates for one decode batch over a compressed and a window cache."""
    blocks = 4096 if device.type != "cpu" else 16
    caches = [random_pages(blocks, device) for _ in range(2)]
    widths = (topk, WINDOW)
    sink = torch.randn(heads, device=device) * 2
    q = torch.randn(sets, tokens, heads, DIM, device=device).bfloat16()
    indices = [
        torch.randint(blocks * BLOCK, (sets, tokens, k), device=device).int()
        for k in widths
    ]
    lens = [torch.full((tokens,), k, dtype=torch.int32, device=device) for k in widths]
    size = sparse_decode_workspace_size(tokens, heads, sum(widths))
    workspace = torch.empty(max(size, 1), dtype=torch.float32, device=device)

    def attention(i: int, out: torch.Tensor | Fp8Output) -> None:
        xpu_sparse_decode_fp8(
            *(q[i], caches[0], caches[1], False),
            *(indices[0][i], lens[0], indices[1][i], lens[1], sink),
            *(SCALE, DIM, NOPE, ROPE),
            out,
            workspace=workspace,
        )

    def reference() -> torch.Tensor:
        return by_rows(
            lambda rows: attend(
                q[0, rows],
                torch.cat(
                    [
                        dequantize(pages, part[0, rows].long()).double()
                        for pages, part in zip(caches, indices, strict=True)
                    ],
                    1,
                ),
                sink,
            ),
            tokens,
        )

    return candidates(tokens, heads, sets, device, attention, reference)


def prefill(
    tokens: int, heads: int, keys: int, device: torch.device, sets: int
) -> list[Candidate]:
    """Candidates for one prefill chunk over gathered keys."""
    rows = 16384 if device.type != "cpu" else 512
    kv = torch.randn(rows, 1, DIM, device=device).bfloat16()
    sink = torch.randn(heads, device=device) * 2
    q = torch.randn(sets, tokens, heads, DIM, device=device).bfloat16()
    indices = torch.randint(rows, (sets, tokens, keys), device=device).int()
    lens = torch.full((tokens,), keys, dtype=torch.int32, device=device)

    def attention(i: int, out: torch.Tensor | Fp8Output) -> object:
        return xpu_sparse_prefill(q[i], kv, indices[i], SCALE, sink, lens, out)

    def reference() -> torch.Tensor:
        return by_rows(
            lambda part: attend(
                q[0, part], kv[indices[0, part].long(), 0].double(), sink
            ),
            tokens,
            32,
        )

    return candidates(tokens, heads, sets, device, attention, reference)


def cases(competitors: Competitors, device: torch.device) -> Iterator[Case]:
    """Decode, then prefill, at shapes of `attention`; nobody competes."""
    dry = device.type == "cpu"
    for heads, topk in ((16, 64),) if dry else SHAPES:
        keys = topk + WINDOW
        written = heads * (DIM + DIM // SCALE_DIMS * 4)
        for tokens in (2,) if dry else (1, 16, 128):
            yield Case(
                "decode to FP8",
                tokens,
                heads,
                keys,
                tokens * (keys * TOKEN_BYTES + heads * DIM * 2 + written),
                4 * tokens * heads * keys * DIM,
                partial(decode, tokens, heads, topk, device, 1 if dry else 8),
            )
        for tokens in (2,) if dry else (2048,):
            rows = min(tokens * keys, 16384)
            yield Case(
                "prefill to FP8",
                tokens,
                heads,
                keys,
                rows * DIM * 2 + tokens * (heads * DIM * 2 + written + keys * 4),
                4 * tokens * heads * keys * DIM,
                partial(prefill, tokens, heads, keys, device, 1 if dry else 2),
            )
