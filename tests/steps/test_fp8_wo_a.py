# SPDX-License-Identifier: Apache-2.0
"""A wo_a in FP8 with a scale for each row, or one for all, is loaded unpacked."""

from typing import Any

import pytest
import torch
from helpers import fp8_rows, layer_parts, layout, model_configs, model_layers
from helpers import output_projection as projection

# With the kernel that a release takes by itself, or that of `--linear-backend xpu`
# where it has two.
SCHEMES = {
    "W8A8 by rows": ("channel", "token", "auto"),
    "W8A16 by rows": ("channel", None, "auto"),
    "W8A8 of one scale": ("tensor", "tensor", "auto"),
}
if hasattr(
    layout.module("vllm.model_executor.kernels.linear"), "XPUW8A8FP8LinearKernel"
):
    SCHEMES["chosen, W8A8 by rows"] = ("channel", "token", "xpu")
    SCHEMES["chosen, W8A8 of one scale"] = ("tensor", "tensor", "xpu")


def built(scheme: str) -> tuple[Any, Any]:
    """A layer with weights of that scheme, not loaded, and its configuration."""
    torch.manual_seed(0)
    config = model_configs.vllm_config()
    weights, activations, backend = SCHEMES[scheme]
    fp8_rows.take(config, weights, activations)
    config.kernel_config.linear_backend = backend
    as_loaded = layout.module("vllm.utils.torch_utils").set_default_torch_dtype
    with as_loaded(torch.bfloat16):
        return model_layers.attention_layer(config, 0), config


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_output_projection_multiplies_by_scaled_rows(scheme: str) -> None:
    layer, config = built(scheme)
    wo_a = layer_parts.projecting(layer).wo_a
    groups, rank = layer.n_local_groups, layer.o_lora_rank
    with model_configs.current(config):
        weight = fp8_rows.load(wo_a)
        layer_parts.finish_loading(layer)
        layer.wo_b = torch.nn.Identity()
        o, at = projection.inputs(layer, 5)
        got = layer_parts.o_projection(layer, o, at)
    rows = projection.inverse_rope(o.cpu(), layer.rotary_emb.cos_sin_cache.cpu()[at])
    rows = rows.view(len(at), groups, -1)
    wanted = torch.einsum("tgd,grd->tgr", rows, weight.view(groups, rank, -1))
    error = off_by(got, wanted.flatten(1))
    print(f"figure: off by {error:.4f}")
    assert error < projection.TOLERANCE, f"the output projection is off by {error:.3f}"
    assert set(dict(wo_a.named_parameters())) == {"weight"}, "scales remain"


@pytest.mark.unchanged
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_layers_stay_in_fp8(scheme: str) -> None:
    layer, config = built(scheme)
    wo_b = layer_parts.projecting(layer).wo_b
    with model_configs.current(config):
        fp8_rows.load(wo_b)
    assert wo_b.weight.dtype == torch.float8_e4m3fn
    assert hasattr(wo_b, "weight_scale")
