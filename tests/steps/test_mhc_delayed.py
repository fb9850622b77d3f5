# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's hyper-connections, whose gates for the input come from the sublayer
before, take two launches a sublayer."""

from typing import Any

import pytest
import torch
from helpers import kernel_trace, layout
from helpers import reference_hyper_connections as reference

STREAMS, HIDDEN, TOKENS = 4, 512, 5
TOLERANCE = 4e-3
OPS = "vllm.model_executor.kernels.mhc.xpu_delayed"
NUMBERS = (reference.EPS,) * 3 + (reference.POST_MULT, reference.ROUNDS)


class Inputs:
    """A sublayer's output, the streams it goes to, and the next one's weights."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        gates = STREAMS * (STREAMS + 2)
        self.streams = normal(TOKENS, STREAMS, HIDDEN).bfloat16()
        self.output = normal(TOKENS, HIDDEN).bfloat16()
        self.weights = (
            normal(gates, STREAMS * HIDDEN) / 32,
            normal(3).abs(),
            normal(gates),
        )
        self.pre_mix = normal(TOKENS, STREAMS).sigmoid()
        self.post_mix = normal(TOKENS, STREAMS, 1).sigmoid()
        self.comb_mix = normal(TOKENS, STREAMS, STREAMS).softmax(-1)
        self.norm_weight = normal(HIDDEN).bfloat16()


def ops() -> Any:
    """The custom ops, which the module registers."""
    layout.module(OPS)
    return torch.ops.vllm


def expected(
    streams: torch.Tensor, inputs: Inputs, pre_mix: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(post, comb, normalized input, next pre) of streams, float64."""
    next_pre, gates = reference.gates(streams.double(), *inputs.weights)
    x = reference.summed(streams.double(), pre_mix.double())
    x = x * (x.square().mean(-1, keepdim=True) + reference.EPS).rsqrt()
    return (
        gates.post[..., None],
        gates.comb,
        x * inputs.norm_weight.double(),
        next_pre,
    )


def run(kind: str) -> tuple[Any, tuple[torch.Tensor, ...], kernel_trace.Trace]:
    """The op's results, the expected ones, and its cost on the device."""
    inputs, device = Inputs(), layout.device()
    op = ops().mhc_pre_delayed_xpu
    streams, pre_mix = inputs.streams, inputs.pre_mix
    fn, *biases = inputs.weights
    options = {"pre_mix": pre_mix}
    if kind == "entry":
        # The embedding is every stream, and stream 0 the first sublayer's input.
        options = {"x": inputs.output}
        streams = inputs.output[:, None].expand(-1, STREAMS, -1)
        fn = fn.unflatten(1, (STREAMS, HIDDEN)).sum(1)
        pre_mix = torch.eye(STREAMS)[:1].expand(TOKENS, -1)
    given: tuple[torch.Tensor, ...] = (streams, fn, *biases)
    wanted = expected(streams.double(), inputs, pre_mix)
    if kind == "behind a sublayer":
        op = ops().mhc_fused_post_pre_delayed_xpu
        given = (inputs.output, streams, inputs.post_mix, inputs.comb_mix, fn, *biases)
        gates = reference.Gates(
            inputs.post_mix[..., 0].double(), inputs.comb_mix.double()
        )
        mixed = reference.after(inputs.output.double(), streams.double(), gates)
        wanted = mixed, *expected(mixed, inputs, pre_mix)
    options["norm_weight"] = inputs.norm_weight
    moved = {name: value.to(device) for name, value in options.items()}
    tensors = [value.to(device) for value in given]
    with pytest.MonkeyPatch.context() as patch, kernel_trace.traced(patch) as trace:
        made = op(*tensors, *NUMBERS, norm_eps=reference.EPS, **moved)
    return made, wanted, trace


@pytest.mark.parametrize("kind", ["entry", "behind Engram", "behind a sublayer"])
def test_two_launches(kind: str) -> None:
    made, wanted, trace = run(kind)
    print(f"figure: {kernel_trace.summary(trace)}")
    assert not trace.ops, f"{len(trace.ops)} torch operators beside {trace.launches}"
    assert len(trace.launches) == 2, f"launches {trace.launches}"
    for actual, value in zip(made, wanted, strict=True):
        assert actual.shape == value.shape
        off = (actual.double().cpu() - value).norm() / value.norm()
        assert off <= TOLERANCE, f"off by {off:.1e}"


def test_it_is_traced_as_it_runs() -> None:
    """torch.compile sees two ops whose fakes give what the kernels give."""
    inputs = Inputs()
    sublayer = (inputs.output, inputs.streams, inputs.post_mix, inputs.comb_mix)
    rest = (*inputs.weights, *NUMBERS, inputs.pre_mix)
    checked = {
        "mhc_pre_delayed_xpu": (inputs.streams, *rest),
        "mhc_fused_post_pre_delayed_xpu": (*sublayer, *rest),
    }
    for name, arguments in checked.items():
        moved = [
            value.to(layout.device()) if isinstance(value, torch.Tensor) else value
            for value in arguments
        ]
        torch.library.opcheck(
            getattr(ops(), name).default,
            tuple(moved),
            test_utils=("test_schema", "test_faketensor"),
        )
