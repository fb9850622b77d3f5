# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of routed experts."""

import pytest
import torch

from standins.emulated_xpu.fused_experts import XpuFusedMoe
from standins.emulated_xpu.ops import experts
from standins.emulated_xpu.wheel.formats import mxfp4_to_float
from standins.emulated_xpu.wheel.pins import OVERRIDE

TOKENS, TOPK, EXPERTS, HIDDEN, WIDTH = 6, 2, 4, 64, 96


def test_rows_meet_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "0.1.8")
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    weights, ids = torch.rand(TOKENS, EXPERTS).topk(TOPK)
    packed = torch.randint(256, (EXPERTS, WIDTH, HIDDEN // 2), dtype=torch.uint8)
    scales = torch.randint(124, 128, (EXPERTS, WIDTH, HIDDEN // 32), dtype=torch.uint8)
    rows_per_expert = torch.full((EXPERTS,), -1, dtype=torch.int32)
    rows = torch.empty(TOKENS * TOPK, HIDDEN, dtype=torch.bfloat16)
    position = torch.empty(TOKENS, TOPK, dtype=torch.int32)
    experts.remap_hidden_states(
        x, None, rows, None, None, rows_per_expert, position, ids, EXPERTS, EXPERTS
    )
    counts = ids.flatten().bincount(minlength=EXPERTS)
    assert torch.equal(rows_per_expert.long(), counts)

    product = torch.empty(TOKENS * TOPK, WIDTH, dtype=torch.bfloat16)
    experts.cutlass_grouped_gemm_interface(
        rows,
        packed,
        scales,
        None,
        product,
        rows_per_expert,
        WIDTH,
        HIDDEN,
        EXPERTS,
        False,
        True,
    )
    out = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    experts.moe_gather(out, product, weights, position, EXPERTS)

    dense = [
        mxfp4_to_float(packed[number], scales[number]).double()
        for number in range(EXPERTS)
    ]
    expected = torch.stack(
        [
            sum(
                weights[token, choice].double() * (dense[expert] @ x[token].double())
                for choice, expert in enumerate(ids[token].tolist())
            )
            for token in range(TOKENS)
        ]
    )
    assert (out.double() - expected).norm() < 5e-3 * expected.norm()


def test_versions_without_a_limit_refuse_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OVERRIDE, "0.1.8")
    empty = torch.empty(0)
    with pytest.raises(TypeError, match="takes no limit"):
        XpuFusedMoe(
            w13=empty,
            w13_scales=empty,
            w13_bias=None,
            w2=empty,
            w2_scales=empty,
            w2_bias=None,
            n_experts_per_token=1,
            activation="silu",
            num_experts=1,
            is_mxfp4=True,
            gemm1_clamp_limit=10.0,
        )


def test_rows_are_aligned_to_blocks() -> None:
    ids = torch.tensor([[3, 0], [0, 3], [0, -1]])
    rows, blocks = torch.empty(12, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int32)
    experts.moe_align_block_size(ids, 4, 2, rows, blocks, count)
    assert count.item() == 6
    assert rows[:6].tolist() == [1, 2, 4, 6, 0, 3]
    assert blocks[:3].tolist() == [0, 0, 3]


def test_rows_of_a_token_are_summed() -> None:
    rows, out = torch.randn(3, 2, 8).bfloat16(), torch.empty(3, 8).bfloat16()
    experts.moe_sum(rows, out)
    assert out.equal(rows.float().sum(1).bfloat16())
