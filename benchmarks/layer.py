# SPDX-License-Identifier: Apache-2.0
"""The ops around attention: insert, indexer logits, MHC."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.xpu_dsv4.mhc import mhc_post, mhc_pre
from kernels.xpu_dsv4.mqa_logits import fp8_mqa_logits, fp8_paged_mqa_logits
from kernels.xpu_dsv4.qnorm_rope_kv_insert import xpu_qnorm_rope_kv_fp8_insert

from .attention import BLOCK, DIM, NOPE, PAGE, ROPE, TOKEN_BYTES, dequantize
from .files import INSERT, MHC
from .workload import OURS, TORCH, UPSTREAM, Candidate, Case, Others

EPS = 1e-6
INDEX_HEADS, INDEX_DIM = 64, 128
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
    tokens: int, heads: int, others: Others, device: torch.device, sets: int
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

    found = [candidate(OURS, xpu_qnorm_rope_kv_fp8_insert)]
    module = others.upstream(INSERT)
    if module is not None:
        found.append(candidate(UPSTREAM, module.xpu_qnorm_rope_kv_fp8_insert))
    found.append(candidate(TORCH, insert_by_torch))
    return found


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


def index_inputs(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 indexer queries `[rows, 64, 128]` and their weights `[rows, 64]`."""
    q = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device=device)
    weights = torch.randn(rows, INDEX_HEADS, device=device)
    return q.to(torch.float8_e4m3fn), weights


def scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weighted relu(q k): `[rows, keys]`, in the type of `keys`."""
    return torch.einsum(
        "mhn,mh->mn",
        torch.einsum("mhd,nd->mhn", q.to(keys.dtype), keys).relu(),
        weights.to(keys.dtype),
    )


def prefill_logits(rows: int, keys: int, device: torch.device) -> list[Candidate]:
    """Candidates for indexer logits over gathered keys, all visible."""
    q, weights = index_inputs(rows, device)
    k = torch.randn(keys, INDEX_DIM, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(keys, device=device) + 0.5
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, keys)
    out = torch.empty(rows, keys, device=device)
    check = slice(0, min(rows, 16))

    def run() -> None:
        fp8_mqa_logits(q, k, scales, weights, starts, ends, out=out)

    def baseline() -> None:
        for i in range(0, rows, 64):
            part = slice(i, i + 64)
            out[part] = scores(q[part], k.bfloat16(), weights[part]).float() * scales

    def reference() -> torch.Tensor:
        return scores(q[check], k.double(), weights[check]) * scales

    return [
        Candidate(OURS, [run], lambda: out[check], reference),
        Candidate(TORCH, [baseline], lambda: out[check], reference, tolerance=2e-2),
    ]


def decode_logits(rows: int, keys: int, device: torch.device) -> list[Candidate]:
    """Candidates for indexer logits over paged keys, one row a request."""
    q, weights = index_inputs(rows, device)
    width = keys // BLOCK
    blocks = rows * width
    stride = 8640
    flat = torch.zeros(blocks, stride, dtype=torch.uint8, device=device)
    data = torch.randn(blocks, BLOCK * INDEX_DIM, device=device)
    flat[:, : BLOCK * INDEX_DIM] = data.to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(blocks, BLOCK, device=device) + 0.5
    span = slice(BLOCK * INDEX_DIM, BLOCK * (INDEX_DIM + 4))
    flat[:, span] = scales.view(torch.uint8)
    each = INDEX_DIM + 4
    pages = flat.as_strided((blocks, BLOCK, 1, each), (stride, each, each, 1))
    table = torch.randperm(blocks, device=device).int().view(rows, width)
    lens = torch.full((rows,), keys, dtype=torch.int32, device=device)
    out = torch.empty(rows, keys, device=device)

    def run() -> None:
        fp8_paged_mqa_logits(
            q.unsqueeze(1), pages, weights, lens, table, None, keys, out=out
        )

    def gathered(row: int, dtype: torch.dtype) -> torch.Tensor:
        chosen = flat[table[row].long()]
        codes = chosen[:, : BLOCK * INDEX_DIM].contiguous().view(torch.float8_e4m3fn)
        k = codes.to(dtype).view(keys, INDEX_DIM)
        return scores(q[row : row + 1], k, weights[row : row + 1]) * scales[
            table[row].long()
        ].view(1, keys)

    def reference() -> torch.Tensor:
        return torch.cat([gathered(i, torch.float64) for i in range(min(rows, 4))])

    def baseline() -> None:
        for row in range(rows):
            out[row] = gathered(row, torch.bfloat16)[0].float()

    def result() -> torch.Tensor:
        return out[: min(rows, 4)]

    return [
        Candidate(OURS, [run], result, reference),
        Candidate(TORCH, [baseline], result, reference, tolerance=2e-2),
    ]


def mixing(
    tokens: int, hidden: int, others: Others, device: torch.device
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

    def candidate(name: str, pre: object, post: object, note: str = "") -> Candidate:
        return Candidate(
            name,
            [partial(run, pre, post)],
            lambda: results["out"],
            reference,
            tolerance=4e-3,
            note=note,
        )

    found = [candidate(OURS, mhc_pre, mhc_post)]
    module = others.upstream(MHC)
    if module is not None:
        found.append(
            candidate(
                UPSTREAM, module.mhc_pre_torch, module.mhc_post_torch, "its torch path"
            )
        )
    return found


def cases(others: Others, device: torch.device) -> Iterator[Case]:
    """Insert, logits and MHC."""
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
                partial(insert, tokens, heads, others, device, sets),
            )
    each = INDEX_DIM + 4
    for tokens, keys in ((2, 128),) if dry else ((1, 65536), (16, 65536), (128, 16384)):
        yield Case(
            "logits decode",
            tokens,
            INDEX_HEADS,
            keys,
            tokens * keys * (each + 4),
            2 * tokens * INDEX_HEADS * keys * INDEX_DIM,
            partial(decode_logits, tokens, keys, device),
        )
    for tokens, keys in ((3, 96),) if dry else ((256, 16384), (2048, 16384)):
        yield Case(
            "logits prefill",
            tokens,
            INDEX_HEADS,
            keys,
            keys * each + tokens * keys * 4,
            2 * tokens * INDEX_HEADS * keys * INDEX_DIM,
            partial(prefill_logits, tokens, keys, device),
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
                partial(mixing, tokens, hidden, others, device),
            )
