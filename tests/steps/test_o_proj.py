# SPDX-License-Identifier: Apache-2.0
"""The output projection multiplies by wo_a as the checkpoint scales it."""

from typing import Any

import pytest
import torch
from helpers import layer_parts, layout, pin_ops
from helpers import output_projection as projection
from helpers.block_fp8 import load

OP = "deepseek_inv_rope_fp8_quant"


def backends() -> list[Any]:
    """Where wo_a stays in FP8, the kernels that multiply it so, elsewhere all. Where
    upstream has a path, it is right but for the scales of XPU's own kernel: the others
    are `unchanged`."""
    own = ("auto", "fp32")
    if layout.O_PROJECTION_IN_FP8:
        return list(own)
    return [
        pytest.param(
            backend,
            marks=[pytest.mark.unchanged]
            if layout.WITH_XPU_FOLDER and backend not in own
            else [],
        )
        for backend in (*layout.BLOCK_FP8_BACKENDS, *layout.TORCH_BLOCK_FP8, None)
    ]


@pytest.mark.parametrize("backend", backends())
def test_one_launch_and_one_product(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = projection.projected(backend, monkeypatch)
    projection.check(made)
    if layout.O_PROJECTION_IN_FP8:
        assert made.launches == [OP], made.launches


@pytest.mark.unchanged
def test_other_layers_keep_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other platforms, and where its owner asks for nothing, an is_bmm layer."""
    layer = projection.attention("triton")
    kernels = layout.module(f"{layout.LINEAR_KERNELS}.scaled_mm.triton")
    another = layout.another_platform(kernels.current_platform)
    monkeypatch.setattr(kernels, "current_platform", another)
    layer.wo_b.is_bmm, layer.wo_b.bmm_batch_size = True, 1
    load(layer.wo_b)
    assert layer.wo_b.weight.dtype == torch.float8_e4m3fn
    assert hasattr(layer.wo_b, "weight_scale_inv")


@pytest.mark.unchanged
@pytest.mark.parametrize("backend", layout.BLOCK_FP8_BACKENDS)
def test_other_layers_multiply_as_before(backend: str) -> None:
    layer = projection.attention(backend)
    weight = load(layer.wo_b)
    layer_parts.finish_loading(layer)
    x = torch.randn(3, weight.shape[1], dtype=torch.bfloat16)
    got = layer.wo_b.quant_method.apply(layer.wo_b, x.to(layout.device()))
    wanted = x.double() @ weight.T
    assert (got.cpu().double() - wanted).norm() < 0.05 * wanted.norm()


if not layout.WITH_XPU_FOLDER:  # one layer for all platforms
    # The names that the others call in it.
    OTHERS = {"CUDA": "fused_inv_rope_fp8_quant", "ROCm": "rocm_inv_rope_einsum"}

    @pytest.mark.unchanged
    @pytest.mark.parametrize("platform", OTHERS)
    def test_other_platforms_keep_their_projection(
        platform: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = projection.attention(None)
        layout.pretend_cuda(monkeypatch, rocm=platform == "ROCm")

        def called(*args: object, **kwargs: object) -> None:
            raise InterruptedError(platform)

        monkeypatch.setattr(layout.module(layout.ATTENTION), OTHERS[platform], called)
        o = torch.zeros(1, layer.n_local_heads, 512, dtype=torch.bfloat16)
        with pytest.raises(InterruptedError, match=platform):
            layer_parts.o_projection(layer, o, torch.tensor([0]))


if layout.O_PROJECTION_IN_FP8:

    def test_a_graph_relies_on_the_layouts_that_it_gets() -> None:
        layer = projection.attention("auto")
        op = torch.ops.vllm.xpu_deepseek_inv_rope_fp8_quant
        table, groups = layer.rotary_emb.cos_sin_cache, layer.n_local_groups
        got, promised = pin_ops.layouts(op, *projection.inputs(layer, 5), table, groups)
        assert got == promised
