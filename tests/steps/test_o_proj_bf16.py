# SPDX-License-Identifier: Apache-2.0
"""A wo_a is multiplied in BF16 if it is BF16 or its FP8 kernel has no batched
product."""

import pytest
import torch
from helpers import layer_parts, layout, pin_ops
from helpers import output_projection as projection
from helpers.block_fp8 import load

OP = "deepseek_inv_rope_bf16"
OTHERS = [name for name in layout.BLOCK_FP8_BACKENDS if name not in ("auto", "fp32")]


@pytest.mark.parametrize(
    "backend",
    [*OTHERS, *layout.TORCH_BLOCK_FP8, None],
    ids=lambda backend: f"FP8-{backend}" if backend else "BF16",
)
def test_one_launch_and_one_product(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = projection.projected(backend, monkeypatch)
    projection.check(made)
    assert made.launches == [OP], made.launches


def test_a_graph_relies_on_the_layouts_that_it_gets() -> None:
    layer = projection.attention("auto")
    op = torch.ops.vllm.xpu_deepseek_inv_rope_bf16
    table, groups = layer.rotary_emb.cos_sin_cache, layer.n_local_groups
    got, promised = pin_ops.layouts(op, *projection.inputs(layer, 5), table, groups)
    assert got == promised


@pytest.mark.unchanged
def test_a_product_in_fp8_keeps_its_weight() -> None:
    layer = projection.attention("auto")
    load(layer.wo_a)
    weight, scale = layer.wo_a.bmm_weight, layer.wo_a.bmm_scale
    layer_parts.finish_loading(layer)
    assert layer.wo_a.bmm_weight is weight and layer.wo_a.bmm_scale is scale
    assert layer.wo_a.weight.dtype == weight.dtype
