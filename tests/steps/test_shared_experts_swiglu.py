# SPDX-License-Identifier: Apache-2.0
"""The clamped SwiGLU of the shared experts is one launch, rounded once."""

import inspect
from typing import Any

import pytest
import torch
from helpers import kernel_trace, layout, model_configs

LIMIT = 10.0
ACTIVATION = "vllm.model_executor.layers.activation"
KIND = layout.module(ACTIVATION).SiluAndMulWithClamp
# (alpha, beta), where the release has them.
SCALED = [(), (1.702, 1.0)] if "alpha" in inspect.signature(KIND).parameters else [()]
# Half a unit in the last of bfloat16's 8 bits, and what float32 adds.
ROUNDING = 2.0**-8 * 1.01


def activation(custom_ops: str, scaled: tuple[float, ...] = ()) -> Any:
    config = model_configs.vllm_config()
    config.compilation_config.custom_ops = [custom_ops]
    with model_configs.current(config):
        return KIND(LIMIT, *scaled)


def reference(x: torch.Tensor, alpha: float = 1.0, beta: float = 0.0) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def projected(*shape: int) -> torch.Tensor:
    """Products of which many lie beyond the limit."""
    torch.manual_seed(0)
    return (8 * torch.randn(shape)).to(layout.device(), torch.bfloat16)


def test_it_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    act, x = activation("all"), projected(5, 256)
    with kernel_trace.traced(monkeypatch) as trace:
        act(x)
    print(f"figure: {kernel_trace.summary(trace)}")
    assert (len(trace.launches), trace.ops) == (1, []), (
        f"takes {len(trace.launches)} launches and {len(trace.ops)} operators"
    )


@pytest.mark.parametrize("scaled", SCALED, ids=str)
@pytest.mark.parametrize("shape", [(7, 222), (3, 2, 4096), (33, 2050)], ids=str)
def test_it_rounds_once(shape: tuple[int, ...], scaled: tuple[float, ...]) -> None:
    x = projected(*shape)
    expected = reference(x, *scaled)
    error = (activation("all", scaled)(x).double() - expected).abs()
    off = float((error / (ROUNDING * expected.abs() + 2.0**-126)).max())
    print(f"figure: {off:.2f} roundings")
    assert off <= 1, f"is off by {off:.1f} roundings to bfloat16"


def test_nothing_is_written_behind_a_row() -> None:
    launch = layout.module(ACTIVATION).silu_and_mul_with_clamp_triton
    wide = torch.full((5, 120), 7.0, dtype=torch.bfloat16, device=layout.device())
    launch(wide[:, :111], projected(5, 222), LIMIT)
    assert wide[:, 111:].eq(7).all() and not wide[:, :111].eq(7).all()


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_strided_rows_and_none() -> None:
    wide = projected(6, 512)
    wide[1::2] = float("nan")
    act = activation("all")
    for x in (wide[::2], wide[::2, ::2], wide[::2, 128:384], wide[2, 3:5]):
        error = (act(x).double() - reference(x)).abs()
        assert (error <= 3 * ROUNDING * reference(x).abs()).all()
    assert act(wide[:0]).shape == (0, 256)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_nan_stays() -> None:
    x = projected(2, 8)
    x[0, 1] = x[1, 6] = float("nan")
    nan = activation("all")(x).isnan()
    assert nan.nonzero().tolist() == [[0, 1], [1, 2]]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_torch_compile_gets_torch() -> None:
    """Without custom operators, torch.compile gets plain operators that it can fuse."""
    x = projected(5, 256)
    act = activation("none")
    assert torch.equal(act(x), act.forward_native(x))


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_cuda_keeps_its_op() -> None:
    act, x, calls = activation("all"), projected(5, 256), []
    act.op = lambda *args: calls.append(args)
    out = act.forward_cuda(x)
    assert calls[0][:3] == (out, x, LIMIT)
