# SPDX-License-Identifier: Apache-2.0
"""The ops around attention: insert and MHC."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kernels.xpu_dsv4.kv.qnorm_rope_kv_insert import xpu_qnorm_rope_kv_fp8_insert
from kernels.xpu_dsv4.mhc.mhc import mhc_post, mhc_pre

from ..files import INSERT, MHC
from ..workload import OURS, SYCL, TORCH, UPSTREAM, Candidate, Case, Competitors
from .attention import BLOCK, DIM, NOPE, PAGE, ROPE, TOKEN_BYTES, dequantize

EPS = 1e-6
STREAMS, GATES, SINKHORN = 4, 24, 20


def rotated(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Interleaved RoPE on the last 64 dims, in the type of `x`."""
    cos, sin = table[positions].to(x.dtype).chunk(2, -1)
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., NOPE::2], x[..., NOPE + 1 :: 2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((x[..., :NOPE], pairs.flatten(-2)), -1)


def normalized(q: torch.Tensor) -> torch.Tensor:
    """RMS norm without weight over the last axis."""
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS)


def insert(
    tokens: int, heads: int, competitors: Competitors, device: torch.device, sets: int
) -> list[Candidate]:
    """Candidates for q norm, RoPE and the FP8 insert of one batch."""
    q = torch.randn(sets, tokens, heads, DIM, device=device).bfloat16()
    kv = torch.randn(sets, tokens, DIM, device=device).bfloat16()
    blocks = max(sets * tokens // BLOCK, 1) * 2
    slots = torch.randperm(blocks * BLOCK, device=device)[: sets * tokens]
    slots = slots.view(sets, tokens)
    positions = torch.randint(4096, (tokens,), device=device)
    angles = torch.rand(4096, ROPE // 2, device=device) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), -1)

    def reference() -> torch.Tensor:
        queries = rotated(normalized(q[0].double()), positions, table)
        return torch.cat(
            (queries.flatten(), rotated(kv[0].double(), positions, table).flatten())
        )

    def candidate(name: str, function: Callable[..., object]) -> Candidate:
        own = q.clone()
        cache = torch.zeros(blocks, PAGE, dtype=torch.uint8, device=device)
        pages = cache.as_strided((blocks, BLOCK, TOKEN_BYTES), (PAGE, TOKEN_BYTES, 1))
        return Candidate(
            name,
            [
                partial(
                    function,
                    own[i],
                    kv[i],
                    cache,
                    slots[i],
                    positions,
                    table,
                    EPS,
                    BLOCK,
                )
                for i in range(sets)
            ],
            lambda: torch.cat(
                (own[0].double().flatten(), dequantize(pages, slots[0]).flatten())
            ),
            reference,
            tolerance=3e-2 if heads < 8 else 1e-2,
            note="FP8 keys: loose bound",
        )

    candidates = [candidate(OURS, xpu_qnorm_rope_kv_fp8_insert)]
    module = competitors.upstream(INSERT)
    if module is not None:
        candidates.append(candidate(UPSTREAM, module.xpu_qnorm_rope_kv_fp8_insert))
    op = competitors.sycl("deepseek_qnorm_rope_kv_insert")
    if op is not None:
        candidates.append(
            candidate(SYCL, lambda *arguments: op(*arguments, "fp8_ds_mla"))
        )
    candidates.append(candidate(TORCH, insert_by_torch))
    return candidates


def insert_by_torch(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    eps: float,
    block_size: int,
) -> None:
    """The insert in torch operations, for a cache `[blocks, bytes]`."""
    q.copy_(rotated(normalized(q.float()), positions, table))
    keys = rotated(kv.float(), positions, table)
    parts = keys[:, :NOPE].unflatten(-1, (7, 64))
    largest = parts.abs().amax(-1).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(largest / 448))
    codes = (parts / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn)
    block, place = (slots // block_size)[:, None], (slots % block_size)[:, None]
    span = torch.arange(576, device=q.device)
    rope = keys[:, NOPE:].bfloat16().view(torch.uint8)
    data = torch.cat((codes.flatten(1).view(torch.uint8), rope), -1)
    cache[block, place * 576 + span] = data
    steps = block_size * 576 + place * 8 + span[:7]
    cache[block, steps] = (exponent + 127).to(torch.uint8)


def mixing(
    tokens: int, hidden: int, competitors: Competitors, device: torch.device
) -> list[Candidate]:
    """Candidates for MHC's pre and post parts of one layer."""
    streams = torch.randn(tokens, STREAMS, hidden, device=device).bfloat16()
    fn = torch.randn(GATES, STREAMS * hidden, device=device) * hidden**-0.5
    scale = torch.rand(3, device=device)
    base = torch.randn(GATES, device=device)
    constants = (fn, scale, base, EPS, EPS, EPS, 2.0, SINKHORN)
    results: dict[str, torch.Tensor] = {}

    def run(
        pre: Callable[..., tuple[torch.Tensor, ...]],
        post: Callable[..., torch.Tensor],
    ) -> None:
        gate, comb, layer_input = pre(streams, *constants)
        results["out"] = post(layer_input, streams, gate, comb)

    def reference() -> torch.Tensor:
        x = streams.double()
        flat = x.flatten(1)
        mixes = flat @ fn.double().T
        mixes = mixes * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        s, b = scale.double(), base.double()
        pre = torch.sigmoid(mixes[:, :4] * s[0] + b[:4]) + EPS
        gate = torch.sigmoid(mixes[:, 4:8] * s[1] + b[4:8]) * 2.0
        comb = (mixes[:, 8:] * s[2] + b[8:]).view(-1, STREAMS, STREAMS)
        comb = torch.softmax(comb, -1) + EPS
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        for _ in range(SINKHORN - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + EPS)
            comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        layer_input = torch.einsum("ti,tid->td", pre, x)
        mixed = torch.einsum("tij,tid->tjd", comb, x)
        return gate.unsqueeze(-1) * layer_input.unsqueeze(1) + mixed

    def candidate(name: str, pre: Any, post: Any, note: str = "") -> Candidate:
        return Candidate(
            name,
            [partial(run, pre, post)],
            lambda: results["out"],
            reference,
            tolerance=4e-3,
            note=note,
        )

    candidates = [candidate(OURS, mhc_pre, mhc_post)]
    pre, post = (competitors.sycl(name) for name in ("mhc_pre", "mhc_post"))
    if pre is not None and post is not None:
        candidates.append(candidate(SYCL, pre, post))
    module = competitors.upstream(MHC)
    if module is not None:
        candidates.append(
            candidate(
                UPSTREAM, module.mhc_pre_torch, module.mhc_post_torch, "its torch path"
            )
        )
    return candidates


def cases(competitors: Competitors, device: torch.device) -> Iterator[Case]:
    """Insert and MHC."""
    dry = device.type == "cpu"
    sets = 1 if dry else 8
    for heads in (16,) if dry else (16, 64, 128):
        for tokens in (2,) if dry else (1, 16, 128, 2048):
            yield Case(
                "insert",
                tokens,
                heads,
                0,
                tokens * (heads * DIM * 4 + DIM * 2 + TOKEN_BYTES),
                0,
                partial(insert, tokens, heads, competitors, device, sets),
            )
    for hidden in (256,) if dry else (4096, 7168):
        for tokens in (3,) if dry else (1, 16, 128, 2048):
            row = STREAMS * hidden * 2
            yield Case(
                f"mhc {hidden}",
                tokens,
                0,
                0,
                tokens * 3 * row + GATES * STREAMS * hidden * 4,
                2 * tokens * GATES * STREAMS * hidden,
                partial(mixing, tokens, hidden, competitors, device),
            )
