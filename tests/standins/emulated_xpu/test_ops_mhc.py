# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of hyper-connections against the kernels' float64 reference."""

from typing import Any

import torch

from kernels.reference.mhc import mhc as reference
from standins.emulated_xpu.ops import mhc

TOKENS, STREAMS, HIDDEN = 3, 4, 96
EPS = (1e-6, 1e-6, 1e-6)
POST_MULT, ROUNDS = 2.0, 20


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "residual": normal(TOKENS, STREAMS, HIDDEN).to(torch.bfloat16),
        "x": normal(TOKENS, HIDDEN).to(torch.bfloat16),
        "post": normal(TOKENS, STREAMS, 1).sigmoid(),
        "comb": normal(TOKENS, STREAMS, STREAMS).softmax(-1),
        "weights": (
            normal(STREAMS * (STREAMS + 2), STREAMS * HIDDEN) / 16,
            normal(3).abs(),
            normal(STREAMS * (STREAMS + 2)),
        ),
    }


def assert_close(actual: Any, expected: Any) -> None:
    """Each tensor of `actual` is that of `expected` up to one rounding to bf16."""
    for tensor, reference_tensor in zip(actual, expected, strict=True):
        exact = reference_tensor.double().view(tensor.shape)
        assert (tensor.double() - exact).norm() < 4e-3 * exact.norm()


def test_before_a_sublayer() -> None:
    tensors = inputs()
    arguments = (tensors["residual"], *tensors["weights"], *EPS, POST_MULT, ROUNDS)
    assert_close(mhc.mhc_pre(*arguments), reference.mhc_pre(*arguments))


def test_after_a_sublayer() -> None:
    tensors = inputs()
    arguments = [tensors[name] for name in ("x", "residual", "post", "comb")]
    assert_close([mhc.mhc_post(*arguments)], [reference.mhc_post(*arguments)])


def test_between_two_sublayers() -> None:
    tensors = inputs()
    arguments = [tensors[name] for name in ("x", "residual", "post", "comb")]
    arguments += [*tensors["weights"], *EPS, POST_MULT, ROUNDS]
    results = mhc.mhc_fused_post_pre(*arguments)
    assert_close(results, reference.mhc_fused_post_pre(*arguments))


def test_the_head_writes_in_place() -> None:
    tensors = inputs()
    fn, scale, base = tensors["weights"]
    weights = (fn[:STREAMS], scale[:1], base[:STREAMS])
    out = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    mhc.hc_head_fused(tensors["residual"], *weights, out, 1e-6, 1e-6)
    expected = reference.hc_head(tensors["residual"], *weights, 1e-6, 1e-6)
    assert_close([out], [expected])
