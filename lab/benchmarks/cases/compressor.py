# SPDX-License-Identifier: Apache-2.0
"""The compressor of ratio-128 layers: one entry of a page for 128 tokens."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch

from kernels.xpu_dsv4.kv.compressor import compress_norm_rope_insert

from ..files import COMPRESSOR
from ..workload import OURS, UPSTREAM, Candidate, Case, Competitors
from .attention import BLOCK, DIM, PAGE, ROPE, TOKEN_BYTES, dequantize
from .layer import EPS, rotated

RATIO, STATE_BLOCK = 128, 8
"""Tokens of an entry, and of a block of states."""
STATE_BYTES = 4 * 2 * DIM


def compress(
    tokens: int, competitors: Competitors, device: torch.device, sets: int
) -> list[Candidate]:
    """Candidates for one request's first `tokens` tokens, every 128th ends an entry."""
    blocks = tokens // STATE_BLOCK
    states = torch.randn(sets, blocks, STATE_BLOCK, 2 * DIM, device=device)
    table = torch.randperm(blocks, device=device).int()[None]
    positions = torch.arange(tokens, device=device)
    requests = torch.zeros(tokens, dtype=torch.int32, device=device)
    weight = torch.randn(DIM, device=device).bfloat16()
    angles = torch.rand(tokens, ROPE // 2, device=device) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    slots = positions // RATIO
    kv_slots = torch.where(positions % RATIO == RATIO - 1, slots, -1)

    def reference() -> torch.Tensor:
        rows = states[0][table[0].long()].flatten(0, 1).double()
        values, scores = rows.unflatten(0, (-1, RATIO)).split(DIM, -1)
        x = (scores.softmax(1) * values).sum(1)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()
        return rotated(x, positions[::RATIO], cos_sin)

    def candidate(name: str, function: Callable[..., None]) -> Candidate:
        cache = torch.zeros(tokens // BLOCK + 1, PAGE, dtype=torch.uint8, device=device)
        pages = cache.as_strided(
            (len(cache), BLOCK, TOKEN_BYTES), (PAGE, TOKEN_BYTES, 1)
        )
        given = (requests, positions, positions, table, weight, EPS, cos_sin, pages)
        return Candidate(
            name,
            [partial(function, each, *given, kv_slots) for each in states],
            lambda: dequantize(pages, slots[::RATIO]),
            reference,
            tolerance=3e-2,
            note="FP8 entries: loose bound",
        )

    candidates = [
        candidate(
            OURS,
            partial(compress_norm_rope_insert, compress_ratio=RATIO, overlap=False),
        )
    ]
    module = competitors.upstream(COMPRESSOR)
    if module is not None:
        launch = module.compress_norm_rope_store_triton
        candidates.append(candidate(UPSTREAM, partial(_upstream, launch)))
    return candidates


def _upstream(
    launch: Callable[..., None],
    states: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    pages: torch.Tensor,
    kv_slots: torch.Tensor,
) -> None:
    launch(
        state_cache=states,
        num_actual=len(slots),
        token_to_req_indices=requests,
        positions=positions,
        slot_mapping=slots,
        block_table=table,
        block_size=STATE_BLOCK,
        state_width=DIM,
        cos_sin_cache=cos_sin,
        kv_cache=pages,
        k_cache_metadata=SimpleNamespace(slot_mapping=kv_slots),
        pdl_kwargs={},
        head_dim=DIM,
        rope_head_dim=ROPE,
        compress_ratio=RATIO,
        overlap=False,
        use_fp4_cache=False,
        rms_norm_weight=weight,
        rms_norm_eps=eps,
        quant_block=64,
        token_stride=576,
        scale_dim=8,
    )


def cases(competitors: Competitors, device: torch.device) -> Iterator[Case]:
    """One entry, and the chunks of a prefill."""
    dry = device.type == "cpu"
    for tokens in (256,) if dry else (128, 2048, 8192):
        yield Case(
            "compressor",
            tokens,
            0,
            0,
            tokens * STATE_BYTES + tokens // RATIO * TOKEN_BYTES,
            0,
            partial(compress, tokens, competitors, device, 1 if dry else 4),
        )
