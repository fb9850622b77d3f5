# SPDX-License-Identifier: Apache-2.0
"""Routed experts clamp at the model's swiglu_limit, whose quantization omits it.

The config of INT4 experts is such a one; the experts that read it are the same class
for every format, so MXFP4's weights will do.
"""

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

    def run(
        self, limit: float | None, model_limit: float | None, activation: str = "SILU"
    ) -> torch.Tensor:
        """The output of vLLM's experts, `[7, HIDDEN]`."""
        device = layout.device()
        experts = model_layers.mxfp4_experts(
            [scale.to(device) for scale in (self.w13[1], self.w2[1])],
            limit=limit,
            model_limit=model_limit,
            activation=activation,
            num_experts=EXPERTS,
            topk=TOPK,
            hidden=HIDDEN,
            inter=INTER,
        )
        inputs = (self.x, self.w13[0], self.w2[0], self.topk_weights, self.topk_ids)
        return experts(*(tensor.to(device) for tensor in inputs)).cpu()

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


def test_the_models_limit_clamps() -> None:
    case = Case()
    error = off_by(case.run(None, LIMIT), case.reference(LIMIT))
    print(f"figure: the routed experts are off by {error:.4f}")
    assert error < 5e-3, f"the routed experts are off by {error:.3f}"


@pytest.mark.unchanged
def test_the_quantizations_own_limit_comes_first() -> None:
    case = Case()
    assert off_by(case.run(LIMIT, 2 * LIMIT), case.reference(LIMIT)) < 5e-3


@pytest.mark.unchanged
def test_no_limit_no_clamp() -> None:
    case = Case()
    assert off_by(case.run(None, None), case.reference(float("inf"))) < 5e-3


@pytest.mark.unchanged
def test_an_activation_with_its_own_limit_keeps_it() -> None:
    case = Case()
    plain, limited = (case.run(None, limit, "SWIGLUOAI") for limit in (None, 1.0))
    assert limited.equal(plain)
