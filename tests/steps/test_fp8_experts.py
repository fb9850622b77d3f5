# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 with block scales run, clamped at the model's swiglu_limit."""

import pytest
import torch
from helpers.fp8_experts import Experts

LIMIT = 10.0


def off_by(limit: float | None, tokens: int) -> float:
    experts = Experts(limit)
    x = torch.randn(tokens, experts.w13.shape[2]).bfloat16()
    topk_weights, ids = torch.rand(tokens, len(experts.w13)).topk(2)
    given = (x, topk_weights, ids.to(torch.int32))
    got = experts.run(*given).double()
    wanted = experts.reference(*given, torch.inf if limit is None else limit)
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_gate_and_up_are_clamped(tokens: int) -> None:
    error = off_by(LIMIT, tokens)
    print(f"figure: the experts are off by {error:.4f}")
    assert error < 1e-2, f"the experts are off by {error:.3f}"
