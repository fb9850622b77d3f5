# SPDX-License-Identifier: Apache-2.0
"""Indexer logits over gathered and paged keys, in FP8 and in MXFP4.

Upstream's releases compute neither in Triton, so ours is compared with torch, and FP8
with the ops of vllm-xpu-kernels where they are installed.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from kernels.xpu_dsv4.indexer.mqa_logits import fp8_mqa_logits, fp8_paged_mqa_logits
from kernels.xpu_dsv4.indexer.mqa_logits_mxfp4 import (
    mxfp4_mqa_logits,
    mxfp4_paged_mqa_logits,
)

from ..workload import OURS, SYCL, TORCH, Candidate, Case, Competitors
from .attention import BLOCK

INDEX_HEADS, INDEX_DIM = 64, 128
PAGE = 8640
"""Bytes from one page of 64 keys to the next; v0.22.1 gives both formats the same."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Keys = Callable[[torch.dtype], torch.Tensor]
Run = Callable[[torch.Tensor], object]


def scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weighted relu(q k): `[rows, keys]`, in the type of `keys`."""
    return torch.einsum(
        "mhn,mh->mn",
        torch.einsum("mhd,nd->mhn", q.to(keys.dtype), keys).relu(),
        weights.to(keys.dtype),
    )


@cache
def e2m1_values(device: torch.device) -> torch.Tensor:
    """fp32 values of the 16 codes, made once: a graph may not copy from the host."""
    return torch.tensor((*E2M1, *(-value for value in E2M1)), device=device)


def mxfp4_values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """fp32 values `[..., 128]` of `[..., 64]` packed bytes and `[..., 4]` exponents."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    blocks = e2m1_values(codes.device)[nibbles].unflatten(-1, (-1, 32))
    return (blocks * torch.exp2(exponents.float() - 127)[..., None]).flatten(-2)


def random_mxfp4(
    shape: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes `[..., 64]` and exponents `[..., 4]` of about N(0, 1) values."""
    size = (*shape, INDEX_DIM // 2)
    codes = torch.randint(256, size, dtype=torch.uint8, device=device)
    size = (*shape, INDEX_DIM // 32)
    return codes, torch.randint(124, 128, size, dtype=torch.uint8, device=device)


def flat_candidates(
    run: Run,
    q: torch.Tensor,
    keys: Keys,
    weights: torch.Tensor,
    sycl: Callable[[], torch.Tensor] | None = None,
) -> list[Candidate]:
    """Ours and others, with queries and keys as values, all keys visible."""
    rows, count = q.shape[0], keys(torch.bfloat16).shape[0]
    out = torch.empty(rows, count, device=q.device)
    check = slice(0, min(rows, 16))

    def baseline() -> None:
        k = keys(torch.bfloat16)
        for i in range(0, rows, 64):
            part = slice(i, i + 64)
            out[part] = scores(q[part], k, weights[part]).float()

    def reference() -> torch.Tensor:
        return scores(q[check], keys(torch.float64), weights[check])

    return [
        Candidate(OURS, [partial(run, out)], lambda: out[check], reference),
        *_sycl(sycl, lambda scored: scored[check], reference),
        Candidate(TORCH, [baseline], lambda: out[check], reference, tolerance=2e-2),
    ]


def _sycl(
    call: Callable[[], torch.Tensor] | None,
    part: Callable[[torch.Tensor], torch.Tensor],
    reference: Callable[[], torch.Tensor],
) -> list[Candidate]:
    """The pin's op, which allocates its result; none where there is no such op."""
    if call is None:
        return []
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [call()]

    return [
        Candidate(SYCL, [run], lambda: part(results[0]), reference, note="allocates")
    ]


def prefill(
    fp4: bool,
    rows: int,
    keys: int,
    device: torch.device,
    competitors: Competitors | None = None,
) -> list[Candidate]:
    """Candidates for logits over gathered keys."""
    weights = torch.randn(rows, INDEX_HEADS, device=device)
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, keys)
    if fp4:
        q, q_scales = random_mxfp4((rows, INDEX_HEADS), device)
        k, k_scales = random_mxfp4((keys,), device)
        words = [s.view(torch.int32).squeeze(-1) for s in (q_scales, k_scales)]

        def run(out: torch.Tensor) -> object:
            return mxfp4_mqa_logits(
                q, words[0], k, words[1], weights, starts, ends, out=out
            )

        return flat_candidates(
            run,
            mxfp4_values(q, q_scales),
            lambda dtype: mxfp4_values(k, k_scales).to(dtype),
            weights,
        )
    q8 = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device=device)
    q8 = q8.to(torch.float8_e4m3fn)
    k8 = torch.randn(keys, INDEX_DIM, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(keys, device=device) + 0.5

    def run8(out: torch.Tensor) -> object:
        return fp8_mqa_logits(q8, k8, scales, weights, starts, ends, out=out)

    op = competitors.sycl("fp8_mqa_logits") if competitors else None
    return flat_candidates(
        run8,
        q8,
        lambda dtype: k8.to(dtype) * scales[:, None].to(dtype),
        weights,
        partial(op, q8, k8, scales, weights, starts, ends) if op else None,
    )


def decode(
    fp4: bool,
    rows: int,
    keys: int,
    device: torch.device,
    competitors: Competitors | None = None,
) -> list[Candidate]:
    """Candidates for logits over paged keys, one row per request."""
    weights = torch.randn(rows, INDEX_HEADS, device=device)
    width = keys // BLOCK
    blocks = rows * width
    table = torch.randperm(blocks, device=device).int().view(rows, width)
    lens = torch.full((rows,), keys, dtype=torch.int32, device=device)
    out = torch.empty(rows, keys, device=device)
    sycl: Callable[[], torch.Tensor] | None = None
    half = INDEX_DIM // 2 if fp4 else INDEX_DIM
    flat = torch.zeros(blocks, PAGE, dtype=torch.uint8, device=device)
    pages = flat.as_strided((blocks, BLOCK, 1, half + 4), (PAGE, half + 4, half + 4, 1))
    codes, tail = flat[:, : BLOCK * half], flat[:, BLOCK * half : BLOCK * (half + 4)]
    if fp4:
        data, exponents = random_mxfp4((blocks, BLOCK), device)
        codes.copy_(data.flatten(1))
        tail.copy_(exponents.flatten(1))
        q, q_scales = random_mxfp4((rows, INDEX_HEADS), device)
        values = mxfp4_values(q, q_scales)
        words = q_scales.view(torch.int32).squeeze(-1).unsqueeze(1)

        def run() -> object:
            return mxfp4_paged_mqa_logits(
                q.unsqueeze(1), words, pages, weights, lens, table, None, keys, out=out
            )

    else:
        data = torch.randn(blocks, BLOCK * INDEX_DIM, device=device)
        codes.copy_(data.to(torch.float8_e4m3fn).view(torch.uint8))
        scales = torch.rand(blocks, BLOCK, device=device) + 0.5
        tail.copy_(scales.view(torch.uint8))
        values = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device=device)
        values = values.to(torch.float8_e4m3fn)

        arguments = (values.unsqueeze(1), pages, weights, lens, table, None, keys)

        def run() -> object:
            return fp8_paged_mqa_logits(*arguments, out=out)

        op = competitors.sycl("fp8_paged_mqa_logits") if competitors else None
        sycl = partial(op, *arguments) if op else None

    def gathered(row: int, dtype: torch.dtype) -> torch.Tensor:
        page_ids = table[row].long()
        data = codes[page_ids].view(keys, half)
        if fp4:
            k = mxfp4_values(data, tail[page_ids].reshape(keys, 4)).to(dtype)
        else:
            k = data.view(torch.float8_e4m3fn).to(dtype)
            k = k * tail[page_ids].view(torch.float32).reshape(keys, 1).to(dtype)
        return scores(values[row : row + 1], k, weights[row : row + 1])

    def reference() -> torch.Tensor:
        return torch.cat([gathered(i, torch.float64) for i in range(min(rows, 4))])

    def baseline() -> None:
        for row in range(rows):
            out[row] = gathered(row, torch.bfloat16)[0].float()

    def result() -> torch.Tensor:
        return out[: min(rows, 4)]

    return [
        Candidate(OURS, [run], result, reference),
        *_sycl(sycl, lambda scored: scored[: min(rows, 4)], reference),
        Candidate(TORCH, [baseline], result, reference, tolerance=2e-2),
    ]


def cases(competitors: Competitors, device: torch.device) -> Iterator[Case]:
    """Decode and prefill in both formats."""
    dry = device.type == "cpu"
    decodes = ((2, 128),) if dry else ((1, 65536), (16, 65536), (128, 16384))
    prefills = ((3, 96),) if dry else ((256, 16384), (2048, 16384))
    for fp4, name in ((False, "logits"), (True, "MXFP4 logits")):
        key_bytes = (INDEX_DIM // 2 if fp4 else INDEX_DIM) + 4
        for tokens, keys in decodes:
            yield Case(
                f"{name} decode",
                tokens,
                INDEX_HEADS,
                keys,
                tokens * keys * (key_bytes + 4),
                2 * tokens * INDEX_HEADS * keys * INDEX_DIM,
                partial(decode, fp4, tokens, keys, device, competitors),
            )
        for tokens, keys in prefills:
            yield Case(
                f"{name} prefill",
                tokens,
                INDEX_HEADS,
                keys,
                keys * key_bytes + tokens * keys * 4,
                2 * tokens * INDEX_HEADS * keys * INDEX_DIM,
                partial(prefill, fp4, tokens, keys, device, competitors),
            )
