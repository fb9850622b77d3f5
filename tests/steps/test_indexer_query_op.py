# SPDX-License-Identifier: Apache-2.0
"""The queries of the indexer: an op of vllm-xpu-kernels, or the Triton kernel where
the user chooses it."""

from typing import Any

import pytest
import torch
from helpers import kernel_trace, layout
from helpers.indexer_batch import mxfp4, quarter_turns, turned

SWITCH = "VLLM_XPU_DSV4_TRITON_OPS"
TOKENS, HEADS, DIM = 3, 4, 128


def queries() -> tuple[torch.Tensor, ...]:
    """Positions, queries with many midpoints, a rotary table and weights."""
    torch.manual_seed(0)
    # Multiples of 1 / 4 up to 6, or of 4 up to 124: a scale of 1 or a power of two.
    q = torch.randint(-24, 25, (TOKENS, HEADS, DIM)).float() / 4
    q[..., ::32] = 6
    positions = torch.tensor([4, 0, 2])
    return positions, q.bfloat16(), quarter_turns(5), torch.randn(TOKENS, HEADS)


def quantize(
    monkeypatch: pytest.MonkeyPatch, *, fp4: bool, triton: bool
) -> tuple[Any, list[str]]:
    """What the release's function answers, and the kernels that it launched."""
    monkeypatch.setenv(SWITCH, str(int(triton)))
    module = layout.module(f"{layout.OPS}.fused_indexer_q")
    positions, q, table, weights = (x.to(layout.device()) for x in queries())
    with kernel_trace.traced(monkeypatch) as trace:
        answer = module.fused_indexer_q_rope_quant(
            positions, q, table, weights.bfloat16(), 1.0, 1.0, use_fp4=fp4
        )
    return answer, trace.launches


def test_mxfp4_queries_round_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    ((codes, scales), _), launched = quantize(monkeypatch, fp4=True, triton=True)
    positions, q, table, _ = queries()
    wanted, exponents = mxfp4(turned(q, table[positions]))
    got = torch.stack((codes.cpu() & 15, codes.cpu() >> 4), -1).flatten(-2)
    assert launched, f"launched {launched}"
    assert torch.equal(
        scales.cpu().view(torch.uint8).view(exponents.shape), exponents + 127
    )
    # A rotation may turn 0 into -0.
    assert torch.equal(got.long() % 8, wanted.long() % 8)
    assert torch.equal(got[got % 8 > 0].long(), wanted[wanted % 8 > 0].long())


def test_fp8_queries_round_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    (codes, _), launched = quantize(monkeypatch, fp4=False, triton=True)
    positions, q, table, _ = queries()
    x = turned(q, table[positions])
    exponent = torch.frexp(x.abs().amax(-1) / 448)
    scale = torch.exp2((exponent.exponent - (exponent.mantissa == 0.5).int()).double())
    wanted = (x / scale[..., None]).float().to(torch.float8_e4m3fn)
    assert launched, f"launched {launched}"
    assert torch.equal(codes.cpu().float(), wanted.float())


@pytest.mark.unchanged
@pytest.mark.parametrize("fp4", [False, True])
def test_the_op_is_the_default(fp4: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not quantize(monkeypatch, fp4=fp4, triton=False)[1]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_launch_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layout.module(f"{layout.OPS}.fused_indexer_q")
    other = layout.another_platform(module.current_platform)
    monkeypatch.setattr(module, "current_platform", other)
    assert quantize(monkeypatch, fp4=False, triton=False)[1]
