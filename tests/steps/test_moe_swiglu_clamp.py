# SPDX-License-Identifier: Apache-2.0
"""Routed MXFP4 experts clamp gate and up projection at the model's swiglu_limit."""

import pytest
import torch
from helpers import layout, model_layers
from helpers.mxfp4_experts import dequantized, weights

EXPERTS, TOPK, HIDDEN, INTER = 4, 2, 128, 64
LIMIT = 10.0
EXPONENTS = (124, 128)


class Case:
    """Experts whose first products lie far beyond the limit, and their inputs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.w13 = weights(EXPERTS, 2 * INTER, HIDDEN, EXPONENTS)
        self.w2 = weights(EXPERTS, HIDDEN, INTER, EXPONENTS)
        self.x = torch.randn(7, HIDDEN, dtype=torch.bfloat16)
        self.topk_weights, ids = torch.rand(7, EXPERTS).topk(TOPK)
        self.topk_ids = ids.to(torch.int32)

    def run(self, activation: str, limit: float | None) -> torch.Tensor:
        """The output of vLLM's experts, `[7, HIDDEN]`."""
        device = layout.device()
        experts = model_layers.mxfp4_experts(
            [scale.to(device) for scale in (self.w13[1], self.w2[1])],
            limit=limit,
            activation=activation,
            num_experts=EXPERTS,
            topk=TOPK,
            hidden=HIDDEN,
            inter=INTER,
        )
        return experts(
            self.x.to(device),
            self.w13[0].to(device),
            self.w2[0].to(device),
            self.topk_weights.to(device),
            self.topk_ids.to(device),
        ).cpu()

    def reference(self, limit: float) -> torch.Tensor:
        """silu(min(gate, L)) · clamp(up, ±L), in float64."""
        w13, w2 = dequantized(*self.w13), dequantized(*self.w2)
        gate_up = torch.einsum("th,enh->ten", self.x.double(), w13)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        each = torch.nn.functional.silu(gate) * up
        rows = torch.einsum("ten,eon->teo", each, w2)
        taken = rows.gather(1, self.topk_ids.long()[..., None].expand(-1, -1, HIDDEN))
        return (taken * self.topk_weights.double()[..., None]).sum(1)


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_gate_and_up_are_clamped() -> None:
    case = Case()
    error = off_by(case.run("SILU", LIMIT), case.reference(LIMIT))
    print(f"figure: the routed experts are off by {error:.4f}")
    assert error < 5e-3, f"the routed experts are off by {error:.3f}"


@pytest.mark.unchanged
def test_no_limit_no_clamp() -> None:
    case = Case()
    assert off_by(case.run("SILU", None), case.reference(torch.inf)) < 5e-3


@pytest.mark.unchanged
def test_swigluoai_keeps_its_own_limit() -> None:
    case = Case()
    without = case.run("SWIGLUOAI", None)
    assert torch.equal(case.run("SWIGLUOAI", 3.0), without)
