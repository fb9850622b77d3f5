# SPDX-License-Identifier: Apache-2.0
"""Linear layers with NVFP4 weights run on XPU, one op each."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    layout,
    model_configs,
    model_layers,
    packed_formats,
    packed_projections,
)

INPUTS, OUTPUTS = 256, 128
WRITERS: dict[str, Any] = {
    "modelopt": packed_formats.Nvfp4(),
    "modelopt of weights alone": packed_formats.Nvfp4("W4A16_NVFP4"),
    "compressed-tensors of weights alone": packed_formats.Nvfp4WeightOnly(),
}


def loaded(writer: str) -> tuple[Any, torch.Tensor]:
    """A linear layer with a random weight as `writer` writes it; what that stands
    for, in float64."""
    torch.manual_seed(0)
    config = model_configs.vllm_config()
    WRITERS[writer].take(config, leave_out=[])
    built = model_layers.linear(config, INPUTS, OUTPUTS)
    return built, packed_formats.load(WRITERS[writer], built, OUTPUTS, INPUTS)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, INPUTS).bfloat16()


@pytest.mark.parametrize("writer", WRITERS)
def test_it_multiplies(writer: str) -> None:
    built, weight = loaded(writer)
    for count in (1, 17):
        x = rows(count)
        got = built.quant_method.apply(built, x.to(layout.device()))
        wanted = x.double() @ weight.T
        error = (got.cpu().double() - wanted).norm() / wanted.norm()
        assert error < 3e-3, f"the product of {count} rows is off by {error:.4f}"


def test_a_bias_is_added() -> None:
    built, weight = loaded("modelopt")
    x, bias = rows(3), torch.randn(OUTPUTS).bfloat16()
    got = built.quant_method.apply(
        built, x.to(layout.device()), bias.to(layout.device())
    )
    wanted = x.double() @ weight.T + bias.double()
    error = (got.cpu().double() - wanted).norm() / wanted.norm()
    assert error < 4e-3, f"the product with a bias is off by {error:.4f}"


def test_the_weight_stays_packed() -> None:
    assert loaded("modelopt")[0].weight.dtype == torch.uint8


def test_wo_a_is_loaded_in_bf16() -> None:
    packed_formats.check_wo_a(WRITERS["modelopt"])


def test_every_projection_multiplies_what_is_packed(tmp_path: Path) -> None:
    packed_projections.check(tmp_path, WRITERS["modelopt"])


@pytest.mark.compiled
def test_one_compiled_graph_serves_every_batch() -> None:
    built, _ = loaded("modelopt")
    graphs: list[Any] = []

    def keep(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x: built.quant_method.apply(built, x), backend=keep, dynamic=True
    )
    for count in (5, 16, 17, 65):
        x = rows(count).to(layout.device())
        assert compiled(x).equal(built.quant_method.apply(built, x))
    assert len(graphs) == 1, f"{len(graphs)} graphs"
    called = {str(node.target) for node in graphs[0].graph.nodes}
    assert any("xpu_nvfp4_linear" in name for name in called), called


@pytest.mark.parametrize("weight_only", [False, True])
def test_xpu_has_a_kernel(weight_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    select = layout.module(layout.LINEAR_KERNELS).init_nvfp4_linear_kernel
    arguments = {"use_a16": weight_only}
    if "use_a16" not in inspect.signature(select).parameters:
        arguments = {}
    with model_configs.current(model_configs.vllm_config()):
        kind = type(select(**arguments))
    assert kind.__name__ == "XPUNvFp4LinearKernel" and kind.is_supported()[0]
    home = layout.module(kind.__module__)
    another = layout.another_platform(home.current_platform)
    monkeypatch.setattr(home, "current_platform", another)
    assert not kind.is_supported()[0]


@pytest.mark.unchanged
@pytest.mark.parametrize("platform", ["CUDA", "ROCM"])
def test_other_platforms_keep_their_kernels(platform: str) -> None:
    kernels = layout.module(layout.LINEAR_KERNELS)
    known = layout.module("vllm.platforms.interface").PlatformEnum[platform]
    names = [kind.__name__ for kind in kernels._POSSIBLE_NVFP4_KERNELS[known]]
    assert names[-1] in ("EmulationNvFp4LinearKernel", "HummingNvFp4LinearKernel")
    assert not any(name.startswith("XPU") for name in names)


class Marlin:
    """Stands for the kernel, which needs its GPU."""

    def __init__(self, config: object) -> None:
        pass

    @classmethod
    def is_supported(cls) -> tuple[bool, None]:
        return True, None


MODELOPT = layout.module(f"{layout.LAYER_QUANTIZATION}.modelopt")
# Later releases take the weight-only kernel from the list of all kernels.
if hasattr(MODELOPT, "ModelOptNvFp4W4A16LinearMethod"):

    @pytest.mark.unchanged
    @pytest.mark.any_platform
    def test_other_platforms_keep_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
        home = MODELOPT
        if not hasattr(home, "MarlinNvFp4LinearKernel"):  # it asks for a kernel
            home = layout.module(layout.LINEAR_KERNELS)
        if hasattr(home, "current_platform"):
            another = layout.another_platform(home.current_platform)
            monkeypatch.setattr(home, "current_platform", another)
        monkeypatch.setattr(home, "MarlinNvFp4LinearKernel", Marlin)
        with model_configs.current(model_configs.vllm_config()):
            method = MODELOPT.ModelOptNvFp4W4A16LinearMethod(None)
        assert isinstance(method.kernel, Marlin)
