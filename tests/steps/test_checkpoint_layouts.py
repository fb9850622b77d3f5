# SPDX-License-Identifier: Apache-2.0
"""A tensor of another quantization that XPU would load as other values is refused."""

from typing import Any

import pytest
import torch
from helpers import layout, quantizations
from helpers.checkpoint_loader import (
    E4M3,
    E8M0,
    GROUP,
    HIDDEN,
    INTER,
    SHAPES,
    Loader,
    error_of,
    scale_of,
    weight_of,
)

Q, X = "attn.wq_b", "ffn.experts.1.w1"
ROWS, COLUMNS = SHAPES[Q]
_ROW_SCALES = torch.rand(ROWS, 1) + 1
_SIXTEENS = torch.rand(ROWS, COLUMNS // 16).to(E4M3)
_ZEROS = torch.full((1, ROWS // 8), 0x77777777, dtype=torch.int32)
# What a server of this kind would read as other values, of the linear layer `Q`.
WRONG: dict[str, dict[str, torch.Tensor]] = {
    "FP8 by rows": {
        "weight": weight_of(Q, torch.float8_e5m2),
        "weight_scale": _ROW_SCALES * torch.nan,
    },
    "FP8 in blocks": {"weight_scale": torch.rand(ROWS // 64, 1)},
    "NVFP4": {"weight_scale": _SIXTEENS.view(torch.uint8)},
    "NVFP4 by ModelOpt": {
        "weight_scale": _SIXTEENS.float(),
        "weight_scale_2": torch.tensor(torch.nan),
    },
    "MXFP4": {"weight_scale": torch.ones(ROWS, COLUMNS // GROUP).to(E8M0)},
    "MXFP8": {
        "weight": weight_of(Q, torch.float8_e5m2),
        "weight_scale": torch.rand(ROWS, COLUMNS // GROUP),
    },
    "INT4": {"weight_scale": _ROW_SCALES * torch.inf},
    "AutoRound": {"qzeros": _ZEROS + 1, "scales": _ROW_SCALES.T.half() * torch.nan},
    "GPTQ": {"qzeros": _ZEROS - 1, "g_idx": torch.ones(COLUMNS, dtype=torch.int32)},
}
# Those that this release serves.
SERVED = [kind for kind in WRONG if quantizations.KINDS[kind][1]]


class NoExperts(torch.nn.Module):
    """In place of experts: a release may lack those of a quantization before the step
    that refuses it."""

    use_mega_moe = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def finalize_mega_moe_weights(self) -> None:
        """Nothing is packed."""


if SERVED:

    @pytest.mark.parametrize("kind", SERVED)
    def test_refused_of_another_quantization(
        kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layout.module(layout.MODEL), "DeepseekV4MoE", NoExperts)
        found = Loader("model", "fp4", kind)
        for leaf, tensor in WRONG[kind].items():
            error = found.load("layers.1", {f"{Q}.{leaf}": tensor})
            named = f"layers.1.{Q}.{leaf} " in error
            assert named, f"{leaf} is served, or the error names no tensor: {error!r}"


@pytest.mark.parametrize("layer", [Q, "ffn.experts.1.w2"])
@pytest.mark.parametrize("kind", WRONG)
def test_each_tensor_of_another_quantization(kind: str, layer: str) -> None:
    described = quantizations.KINDS[kind][0]
    rows, columns = SHAPES[layer]
    for leaf, tensor in quantizations.stored(kind, rows, columns).items():
        name = f"layers.1.{layer}.{leaf}"
        assert error_of(described, name, tensor) == ""
        larger = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
        larger = larger.reshape(-1, *tensor.shape[1:]).repeat_interleave(2, 0)
        for bad in (tensor.double(), larger.view(tensor.dtype)):
            assert f"{name} " in error_of(described, name, bad), (leaf, bad.shape)


@pytest.mark.parametrize("group", [COLUMNS, 64])
def test_columns_in_groups_of_another_size(group: int) -> None:
    name = f"layers.1.{Q}.g_idx"
    indices = torch.arange(2 * COLUMNS, dtype=torch.int32) // group
    described = quantizations.KINDS["GPTQ"][0]
    assert f"{name} " in error_of(described, name, indices)


@pytest.mark.parametrize("size", [64, 256])
def test_sizes_of_groups_that_nobody_ran(size: int) -> None:
    other = {"block_structure": [size, size]}
    by = quantizations.BY_GROUP | {"group_size": size}
    blocks = quantizations.compressed(8, "float", "block", by, **other)
    grid = ROWS // size, -(-COLUMNS // size)
    name = f"layers.1.{Q}.weight_scale"
    assert f"{name} " in error_of(blocks, name, torch.ones(grid).float())


def test_experts_alone_in_nvfp4() -> None:
    """Those of the model; a draft's stay as DeepSeek publishes them."""
    described = quantizations.KINDS["DeepSeek's own"][0] | {"moe_quant_algo": "NVFP4"}
    for leaf, tensor in quantizations.stored(
        "NVFP4 by ModelOpt", INTER, HIDDEN
    ).items():
        name = f"layers.1.{X}.{leaf}"
        assert error_of(described, name, tensor) == ""
        assert f"{name} " in error_of(described, name, tensor.double())
    name = f"layers.1.{X}.scale"
    assert f"{name} " in error_of(described, name, scale_of(X, "fp4"))
