# SPDX-License-Identifier: Apache-2.0
"""Routed experts of the stand-ins, by offsets (0.1.7) and by counts (0.1.8)."""

from collections.abc import Iterator

import pytest
import torch

from emulated_xpu.formats import mxfp4_to_float
from emulated_xpu.fused_experts import XpuFusedMoe
from emulated_xpu.ops import experts
from emulated_xpu.pins import OVERRIDE

TOKENS, TOPK, EXPERTS, HIDDEN, WIDTH = 6, 2, 4, 64, 96


@pytest.fixture(params=["0.1.7", "0.1.8"])
def version(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setenv(OVERRIDE, request.param)
    experts._grouped_gemm_schema.cache_clear()
    yield request.param
    experts._grouped_gemm_schema.cache_clear()


def test_rows_meet_their_experts(version: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    weights, ids = torch.rand(TOKENS, EXPERTS).topk(TOPK)
    packed = torch.randint(256, (EXPERTS, WIDTH, HIDDEN // 2), dtype=torch.uint8)
    scales = torch.randint(124, 128, (EXPERTS, WIDTH, HIDDEN // 32), dtype=torch.uint8)
    by_offset = version == "0.1.7"
    where = torch.full(
        (EXPERTS + by_offset,), -1, dtype=torch.int64 if by_offset else torch.int32
    )
    rows = torch.empty(TOKENS * TOPK, HIDDEN, dtype=torch.bfloat16)
    position = torch.empty(TOKENS, TOPK, dtype=torch.int32)
    experts.remap_hidden_states(
        x, None, rows, None, None, where, position, ids, EXPERTS, EXPERTS
    )
    counts = ids.flatten().bincount(minlength=EXPERTS)
    if by_offset:
        assert where[0] == 0 and where[-1] == TOKENS * TOPK
        assert torch.equal(where.diff(), counts)
    else:
        assert torch.equal(where.long(), counts)

    product = torch.empty(TOKENS * TOPK, WIDTH, dtype=torch.bfloat16)
    sizes = (WIDTH, HIDDEN, EXPERTS)
    experts.cutlass_grouped_gemm_interface(
        rows, packed, scales, None, product, where, *sizes, False, True
    )
    out = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    rest = (where, EXPERTS) if by_offset else (EXPERTS,)
    experts.moe_gather(out, product, weights, position, *rest)

    dense = [
        mxfp4_to_float(packed[number], scales[number]).double()
        for number in range(EXPERTS)
    ]
    wanted = torch.stack(
        [
            sum(
                weights[token, choice].double() * (dense[expert] @ x[token].double())
                for choice, expert in enumerate(ids[token].tolist())
            )
            for token in range(TOKENS)
        ]
    )
    assert (out.double() - wanted).norm() < 5e-3 * wanted.norm()


def test_a_limit_is_refused_before_it_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OVERRIDE, "0.1.9")
    none = torch.empty(0)
    with pytest.raises(TypeError, match="takes no limit"):
        XpuFusedMoe(
            *(none, none, None, none, none, None, 1, "silu", 1),
            is_mxfp4=True,
            gemm1_clamp_limit=10.0,
        )
