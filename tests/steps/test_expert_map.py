# SPDX-License-Identifier: Apache-2.0
"""Each rank runs the routed experts that vLLM gave it, also if ranks do not divide
them."""

import pytest
import torch
from helpers import moe_layers
from helpers.mxfp4_experts import dequantized, weights

TOKENS, TOPK, HIDDEN, INTER = 9, 2, 128, 64
EXPONENTS = (118, 121)


def off_by(experts: int, ranks: int) -> float:
    """The relative error of the ranks' sum, over tokens that choose among `experts`."""
    torch.manual_seed(0)
    w13 = weights(experts, 2 * INTER, HIDDEN, EXPONENTS)
    w2 = weights(experts, HIDDEN, INTER, EXPONENTS)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    topk_weights, topk_ids = torch.rand(TOKENS, experts).topk(TOPK)
    got = sum(
        moe_layers.run_rank(
            rank, ranks, experts, w13, w2, x, topk_weights, topk_ids.int()
        ).double()
        for rank in range(ranks)
    )
    gate, up = torch.einsum("th,enh->ten", x.double(), dequantized(*w13)).chunk(2, -1)
    rows = torch.einsum(
        "ten,eon->teo", torch.nn.functional.silu(gate) * up, dequantized(*w2)
    )
    taken = rows.gather(1, topk_ids[..., None].expand(-1, -1, HIDDEN))
    wanted = (taken * topk_weights.double()[..., None]).sum(1)
    return float((got - wanted).norm() / wanted.norm())


def test_ranks_that_do_not_divide_the_experts() -> None:
    error = off_by(8, 3)
    print(f"figure: the experts of three ranks are off by {error:.4f}")
    assert error < 1e-2, f"the experts of three ranks are off by {error:.3f}"


@pytest.mark.unchanged
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_divide_them(ranks: int) -> None:
    assert off_by(8, ranks) < 1e-2
