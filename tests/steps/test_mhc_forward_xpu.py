# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections take few launches where vllm-xpu-kernels has no op for them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import kernel_trace, layout, model_configs, model_layers

STREAMS, HIDDEN, TOKENS = 4, 512, 3
ROUNDS = 20
EPS = 1e-6
POST_MULT = 2.0
TOLERANCE = 4e-3


class Inputs:
    """Residual streams of a few tokens, and a sublayer's gate weights."""

    def __init__(self, hidden: int = HIDDEN, seed: int = 11) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.residual = normal(TOKENS, STREAMS, hidden).to(torch.bfloat16)
        self.x = normal(TOKENS, hidden).to(torch.bfloat16)
        self.fn = normal(STREAMS * (STREAMS + 2), STREAMS * hidden) / 32
        self.scale = normal(3).abs()
        self.base = normal(STREAMS * (STREAMS + 2))

    def on_device(self) -> "Inputs":
        moved = object.__new__(Inputs)
        for name, value in vars(self).items():
            setattr(moved, name, value.to(layout.device()))
        return moved


def pre(inputs: Inputs, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(post, comb, input) of manifold-constrained hyper-connections, float64: gates of
    the normalized streams, comb made doubly stochastic by Sinkhorn's rounds."""
    streams = residual.double()
    flat = streams.flatten(1)
    mixes = flat @ inputs.fn.double().T
    mixes *= (flat.square().mean(1, keepdim=True) + EPS).rsqrt()
    first, second, third = mixes.split([STREAMS, STREAMS, STREAMS**2], dim=1)
    base = inputs.base.double().split([STREAMS, STREAMS, STREAMS**2])
    scale = inputs.scale.double()
    gate = (first * scale[0] + base[0]).sigmoid() + EPS
    post = (second * scale[1] + base[1]).sigmoid() * POST_MULT
    comb = (third * scale[2] + base[2]).view(-1, STREAMS, STREAMS).softmax(-1) + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(ROUNDS - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    return post[..., None], comb, (gate[..., None] * streams).sum(1)


def post(
    x: torch.Tensor, residual: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """post_j x + sum_i comb_ij residual_i, float64."""
    mixed = torch.einsum("tij,tih->tjh", comb.double(), residual.double())
    return mixed + gates.double() * x.double()[:, None]


def off_by(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double().cpu() - expected).norm() / expected.norm())


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return off_by(actual, expected) <= TOLERANCE


def head(inputs: Inputs, residual: torch.Tensor) -> torch.Tensor:
    """The streams' sum under sigmoid gates of the normalized streams, float64."""
    flat = residual.double().flatten(1)
    mixes = flat @ inputs.fn[:STREAMS].double().T
    mixes *= (flat.square().mean(1, keepdim=True) + EPS).rsqrt()
    gate = (mixes * inputs.scale[0].double() + inputs.base[:STREAMS]).sigmoid() + EPS
    return (gate[..., None] * residual.double()).sum(1)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The layers' ops where vllm-xpu-kernels brings none for them."""
    monkeypatch.setattr(torch.ops, "_xpu_C", SimpleNamespace())
    with model_configs.current(model_configs.vllm_config()):
        return model_layers.hyper_connections()


def run(
    kind: str, ops: Any, inputs: Inputs
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], kernel_trace.Trace]:
    """The op's result, the expected result, and its cost on the device."""
    device = inputs.on_device()
    weights = (device.fn, device.scale, device.base)
    numbers = (EPS, EPS, EPS, POST_MULT, ROUNDS)
    gates, comb, _ = expected = pre(inputs, inputs.residual)
    mixes = [value.float().to(layout.device()) for value in (gates, comb)]
    with pytest.MonkeyPatch.context() as patch, kernel_trace.traced(patch) as trace:
        if kind == "pre":
            made = ops.pre(device.residual, *weights, *numbers)
        elif kind == "post":
            made = (ops.post(device.x, device.residual, *mixes),)
        else:
            made = ops.fused(device.x, device.residual, *mixes, *weights, *numbers)
    if kind != "pre":
        mixed = post(inputs.x, inputs.residual, gates, comb)
        expected = (mixed,) if kind == "post" else (mixed, *pre(inputs, mixed))
    return made, expected, trace


@pytest.mark.parametrize("kind", layout.HYPER_CONNECTIONS)
def test_few_launches(kind: str, ops: Any) -> None:
    inputs = Inputs()
    made, expected, trace = run(kind, ops, inputs)
    other = [name for name in trace.made if "empty" not in name and "vllm" not in name]
    print(f"figure: {len(other)} torch operators beside {trace.launches}")
    assert not other, f"{len(other)} torch operators beside {trace.launches}"
    assert 1 <= len(trace.launches) <= 2, f"launches {trace.launches}"
    for actual, wanted in zip(made, expected, strict=True):
        assert actual.shape == wanted.shape
        assert close(actual, wanted)


def test_streams_meet_in_the_head(ops: Any) -> None:
    inputs = Inputs()
    device = inputs.on_device()
    (mixed,), _, trace = run("post", ops, inputs)
    weights = (device.fn[:STREAMS], device.scale[:1], device.base[:STREAMS])
    made = ops.head(mixed, *weights, EPS, EPS)
    assert close(made, head(inputs, mixed.cpu()))
    assert len(trace.made) <= 2, f"{len(trace.made)} torch operators"


class Half(torch.nn.Module):
    """Stands for attention and experts: half of the hidden states."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: Any) -> torch.Tensor:
        given = [value for value in args if torch.is_tensor(value)]
        (x,) = [value for value in given if value.is_floating_point()]
        return x * 0.5


def test_layers_mix_their_streams_in_few_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops, "_xpu_C", SimpleNamespace())
    config = model_configs.vllm_config()
    layers = model_layers.decoder_layers(config, 2, Half)
    hidden = config.model_config.hf_config.hidden_size
    streams = Inputs(hidden).residual
    x = streams.to(layout.device())
    expected = streams
    for number, (layer, which) in enumerate(
        (layer, which) for layer in layers for which in ("attn", "ffn")
    ):
        inputs = Inputs(hidden, seed=number)
        for name, value in (
            ("fn", inputs.fn),
            ("scale", inputs.scale),
            ("base", inputs.base),
        ):
            getattr(layer, f"hc_{which}_{name}").data.copy_(value)
        norm = getattr(layer, f"{which}_norm")
        norm.weight.data.copy_(torch.linspace(0.5, 2, hidden))
        gates, comb, mixed = pre(inputs, expected)
        mixed *= (mixed.square().mean(-1, keepdim=True) + EPS).rsqrt()
        mixed *= norm.weight.double().cpu()
        expected = post(mixed / 2, expected, gates, comb)
    with kernel_trace.traced(monkeypatch) as trace:
        made = model_layers.run_layers(layers, x)
    assert trace.launches, f"in torch: {len(trace.made)} torch operators beside []"
    assert off_by(made, expected) < 1e-2
    assert len(trace.launches) <= 3 * 4 + 1, f"launches {trace.launches}"


class Called:
    """An operator namespace that notes which operators are asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.names.append(name)


@pytest.mark.unchanged
def test_cuda_keeps_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_op = layout.module("vllm.model_executor.custom_op")
    platform = layout.another_platform(custom_op.current_platform)
    monkeypatch.setattr(custom_op, "current_platform", platform)
    monkeypatch.setattr(torch.ops, "vllm", called := Called())
    with model_configs.current(model_configs.vllm_config()):
        ops = model_layers.hyper_connections()
    inputs = Inputs()
    streams = (inputs.x, inputs.residual, inputs.x, inputs.x)
    weights = (inputs.fn, inputs.scale, inputs.base, EPS, EPS, EPS, POST_MULT, ROUNDS)
    ops.pre(inputs.residual, *weights)
    ops.post(*streams)
    expected = ["mhc_pre", "mhc_post"]
    if hasattr(ops, "fused"):
        ops.fused(*streams, *weights)
        expected.append("mhc_fused_post_pre")
    names = [name.removesuffix("_tilelang") for name in called.names]
    assert names == expected
