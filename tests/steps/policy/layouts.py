# SPDX-License-Identifier: Apache-2.0
"""A tensor of another quantization that XPU would load as other values is refused."""

from typing import Any

import pytest
import torch
from helpers import layout, published, quantizations
from helpers.checkpoint_loader import (
    E4M3,
    E8M0,
    GROUP,
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
DESCRIBED = {kind: described for kind, (described, _) in quantizations.KINDS.items()}
# Without experts in MXFP4, whose scales are alike.
DESCRIBED["MXFP8"] = quantizations.MXFP8


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


# Other sizes of groups would give other shapes.
SIZES = {"head_dim": 128, "hidden_size": 640, "q_lora_rank": 1152}
LAYER_SHAPES = {Q: (384, 1152), "ffn.experts.1.w2": (640, 1152)}


def told(described: dict[str, Any], **sizes: int) -> Any:
    more = {"moe_intermediate_size": 1152} | SIZES | sizes
    return published.config("V4", quantization_config=described, **more)


@pytest.mark.parametrize("layer", LAYER_SHAPES)
@pytest.mark.parametrize("kind", WRONG)
def test_each_tensor_of_another_quantization(kind: str, layer: str) -> None:
    described = DESCRIBED[kind]
    for leaf, tensor in quantizations.stored(kind, *LAYER_SHAPES[layer]).items():
        name = f"layers.1.{layer}.{leaf}"
        assert published.refusal(told(described), name, tensor) == ""
        for bad in published.others(name, tensor):
            served = f"{leaf} is served as {bad.dtype} of {tuple(bad.shape)}"
            assert f"{name} " in published.refusal(told(described), name, bad), served


def test_blocks_at_an_edge() -> None:
    """A scale has 128 rows and columns, or what is left."""
    name, sizes = "layers.1.attn.wq_a.weight_scale", {"hidden_size": 258}
    found = told(DESCRIBED["FP8 in blocks"], **sizes, q_lora_rank=129)
    assert published.refusal(found, name, torch.ones(2, 3)) == ""
    assert f"{name} " in published.refusal(found, name, torch.ones(1, 2))


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_left_in_16_bits(kind: str) -> None:
    """A linear layer may be, and a norm is; experts are not where the others' weight
    has that name."""
    found, name = told(DESCRIBED[kind]), f"layers.1.{Q}.weight"
    weight, norm = torch.ones(LAYER_SHAPES[Q]).bfloat16(), "layers.1.attn_norm.weight"
    given = {
        name: weight,
        norm: torch.ones(7),
        "layers.1.attn.attn_sink": torch.ones(3),
    }
    assert list(published.passed(found, given)) == list(given)
    assert f"{name} " in published.refusal(found, name, weight[1:])
    for dtype in (torch.uint8, E4M3):
        assert f"{norm} " in published.refusal(found, norm, torch.ones(7).to(dtype))
    leaves = quantizations.stored(kind, 128, 128)
    if "weight" in leaves:
        name = f"layers.1.{X}.weight"
        expert = torch.ones(1152, 640).bfloat16()
        assert f"{name} " in published.refusal(found, name, expert)


PACKED = ["attn.compressor.wkv", "attn.indexer.weights_proj"]


@pytest.mark.parametrize("layer", PACKED)
def test_what_nvfp4_alone_packs_besides(layer: str) -> None:
    codes = torch.ones(6, 40).byte()
    name = f"layers.1.{layer}.weight"
    for kind in ("DeepSeek's own", *WRONG):
        error = published.refusal(told(DESCRIBED[kind]), name, codes)
        assert (error == "") == (kind == "NVFP4 by ModelOpt"), f"{kind}: {error!r}"
        assert f"{name} " in published.refusal(
            told(DESCRIBED[kind]), name, codes.to(E4M3)
        )
    scale = torch.ones(6, 5).to(E4M3)
    found = told(DESCRIBED["NVFP4 by ModelOpt"])
    assert published.refusal(found, f"{name}_scale", scale) == ""


# Of each kind, a tensor of one code that is as it should be, and of one that is not.
CODES: list[tuple[str, str, torch.dtype, list[int], list[int]]] = [
    ("NVFP4", "weight_scale", E4M3, [0x00, 0x7E], [0x7F, 0xFF]),
    ("MXFP4", "weight_scale", torch.uint8, [0x00, 0xFE], [0xFF]),
    ("GPTQ", "qzeros", torch.int32, [0x77, 0x88], [0x78, 0x87, 0x66]),
    ("INT4", "weight_scale", torch.float32, [0x00, 0x3F], [0xBF, 0xFF]),
    ("AutoRound", "scales", torch.float32, [0x00, 0x3F, 0xBF], [0xFF]),
]


@pytest.mark.parametrize(("kind", "leaf", "dtype", "right", "wrong"), CODES)
def test_codes(
    kind: str, leaf: str, dtype: torch.dtype, right: list[int], wrong: list[int]
) -> None:
    """A number of four bytes is made of the same byte four times."""
    shape = quantizations.stored(kind, *LAYER_SHAPES[Q])[leaf].shape
    name, found = f"layers.1.{Q}.{leaf}", told(DESCRIBED[kind])
    for code in (*right, *wrong):
        one = torch.full((dtype.itemsize,), code).byte().view(dtype)
        error = published.refusal(found, name, one.expand(shape))
        assert (error == "") == (code in right), f"{code:#x}: {error!r}"
        assert code in right or f"{name} " in error


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "modelopt"},
        {"quantization": quantizations.MODELOPT},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_how_a_quantization_is_told(described: dict[str, Any]) -> None:
    """By its method, by ModelOpt's own description, or by a group among which one
    leaves weights as they are."""
    name, weight = f"layers.1.{Q}.weight", torch.ones(384, 576).byte()
    if "config_groups" in described:
        given = DESCRIBED["FP8 by rows"]["config_groups"]
        groups = {"activations": {"weights": None}} | given
        described = described | {"config_groups": groups}
        weight = torch.ones(384, 1152).to(E4M3)
    assert published.refusal(told(described), name, weight) == ""
    assert f"{name} " in published.refusal(told(described), name, weight[1:])


@pytest.mark.parametrize("group", [1152, 64])
def test_columns_in_groups_of_another_size(group: int) -> None:
    name, found = f"layers.1.{Q}.g_idx", told(DESCRIBED["GPTQ"])
    indices = torch.arange(1152, dtype=torch.int32) // group
    assert f"{name} " in published.refusal(found, name, indices)


@pytest.mark.parametrize("size", [64, 256])
def test_sizes_of_groups_that_nobody_ran(size: int) -> None:
    other = {"block_structure": [size, size]}
    by = quantizations.BY_GROUP | {"group_size": size}
    blocks = quantizations.compressed(8, "float", "block", by, **other)
    grid = ROWS // size, -(-COLUMNS // size)
    name = f"layers.1.{Q}.weight_scale"
    assert f"{name} " in error_of(blocks, name, torch.ones(grid).float())


def test_experts_alone_in_nvfp4() -> None:
    """Those of the model and of a draft's stage that was converted."""
    found = published.config("V4", **published.KINDS["NVFP4 experts"])
    for name, tensor in published.tensors("V4", "NVFP4 experts").items():
        if published.converted(name, "NVFP4 experts"):
            for bad in published.others(name, tensor):
                assert f"{name} " in published.refusal(found, name, bad)
    name = f"layers.1.{X}.scale"
    assert f"{name} " in published.refusal(found, name, scale_of(X, "fp4"))
