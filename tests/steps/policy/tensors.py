# SPDX-License-Identifier: Apache-2.0
"""The scales of a checkpoint keep their values; what XPU would misread is refused."""

from typing import Any

import pytest
import torch
from helpers import layout, published, quantizations
from helpers.checkpoint_loader import (
    E4M3,
    E8M0,
    EXPERTS,
    HIDDEN,
    LAYERS,
    LINEARS,
    SHAPES,
    check_held,
    error_of,
    loader,
    scale_of,
    weight_of,
)

every_owner = pytest.mark.parametrize("owner", LAYERS)


def unless_rounded(test: Any) -> Any:
    """Mark a test `unchanged` where the loader of MXFP4 experts rounds float32 scales
    itself, which leaves powers of two as they are."""
    return pytest.mark.unchanged(test) if layout.RELEASE >= (0, 31) else test


@unless_rounded
@every_owner
def test_float32_scales_of_mxfp4_experts(owner: str) -> None:
    check_held(owner, "fp4", dict.fromkeys(EXPERTS, torch.float32))


@pytest.mark.unchanged
@every_owner
@pytest.mark.parametrize("linears", [E8M0, torch.float32])
def test_float32_scales_of_fp8_experts(owner: str, linears: torch.dtype) -> None:
    dtypes = dict.fromkeys(EXPERTS, torch.float32) | dict.fromkeys(LINEARS, linears)
    check_held(owner, "fp8", dtypes)


@pytest.mark.unchanged
@every_owner
@pytest.mark.parametrize("linears", [E8M0, torch.float32])
@pytest.mark.parametrize("described", ["ue8m0", None])
def test_powers_of_two_beside_mxfp4_experts(
    owner: str, linears: torch.dtype, described: str | None
) -> None:
    quantization = loader(owner).hf_config.quantization_config
    quantization["scale_fmt"] = described
    if described is None:
        del quantization["scale_fmt"]
    dtypes = dict.fromkeys(EXPERTS, E8M0) | dict.fromkeys(LINEARS, linears)
    check_held(owner, "fp4", dtypes)


@pytest.mark.unchanged
def test_float32_scales_that_are_no_powers_of_two_beside_fp8_experts() -> None:
    scale = scale_of("attn.wq_b", "fp8", torch.float32) * 1.1
    found = loader("model", "fp8")
    assert found.load("layers.1", {"attn.wq_b.scale": scale}) == ""
    held = found.held("model.layers.1", "attn.wq_b", len(scale))
    assert torch.equal(held, scale)


Q, X = "attn.wq_b", "ffn.experts.1.w1"
_SCALE, _FP8_SCALE = scale_of(Q, "fp4"), scale_of(X, "fp8")
_MXFP4_SCALE, _FLOAT = scale_of(X, "fp4"), scale_of(Q, "fp4", torch.float32)
_TABLE = torch.arange(256).view(128, 2) % 4
# What a checkpoint has of which tensor, with experts in which format.
BAD: dict[str, tuple[str, str, torch.Tensor]] = {
    "float32 between powers of two": ("fp4", f"1.{Q}.scale", _FLOAT * 1.1),
    "float32 below zero": ("fp4", f"1.{Q}.scale", -_FLOAT),
    "float32 of MXFP4": ("fp4", f"1.{X}.scale", _MXFP4_SCALE.float() * 1.1),
    "NaN in float32": ("fp8", f"1.{X}.scale", _FP8_SCALE.float() * torch.nan),
    "bfloat16 scales": ("fp4", f"1.{Q}.scale", _SCALE.bfloat16()),
    "bytes": ("fp4", f"1.{Q}.scale", _SCALE.view(torch.uint8)),
    "bytes of an expert": ("fp8", f"1.{X}.scale", _FP8_SCALE.view(torch.uint8)),
    "NaN": ("fp4", f"1.{Q}.scale", torch.full_like(_SCALE, torch.nan)),
    "NaN of MXFP4": ("fp4", f"1.{X}.scale", torch.full_like(_MXFP4_SCALE, torch.nan)),
    "NaN of an expert": ("fp8", f"1.{X}.scale", torch.full_like(_FP8_SCALE, torch.nan)),
    "blocks of 64 rows": ("fp4", f"1.{Q}.scale", _SCALE.repeat_interleave(2, 0)),
    "one scale for all": ("fp8", f"1.{X}.scale", _FP8_SCALE[:, :1]),
    "one scale for a row": ("fp4", f"1.{X}.scale", _MXFP4_SCALE[:, :1]),
    "e5m2": ("fp4", f"1.{Q}.weight", weight_of(Q, torch.float8_e5m2)),
    "e5m2 experts": ("fp8", f"1.{X}.weight", weight_of(X, torch.float8_e5m2)),
    "a BF16 layer": ("fp4", f"1.{Q}.weight", weight_of(Q, torch.bfloat16)),
    "BF16 experts": ("fp8", f"1.{X}.weight", weight_of(X, torch.bfloat16)),
    "FP8 instead of MXFP4": ("fp4", f"1.{X}.weight", weight_of(X, E4M3)),
    "more rows": ("fp4", f"1.{Q}.weight", weight_of(Q, E4M3, 128)),
    "more rows of an expert": ("fp8", f"1.{X}.weight", weight_of(X, E4M3, 128)),
    "an FP8 norm": ("fp4", "1.ffn_norm.weight", torch.ones(HIDDEN).to(E4M3)),
    "more sinks": ("fp4", "1.attn.attn_sink", torch.rand(layout.HEADS + 1)),
    "float64 sinks": ("fp4", "1.attn.attn_sink", torch.rand(layout.HEADS).double()),
    "a float64 bias": ("fp4", "1.ffn.gate.bias", torch.rand(4).double()),
    "an integer router": ("fp4", "1.ffn.gate.weight", torch.ones(4, HIDDEN).int()),
    "a float table": ("fp4", "0.ffn.gate.tid2eid", _TABLE.float()),
    "a table of other experts": ("fp4", "0.ffn.gate.tid2eid", _TABLE + 1),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    expert_dtype, name, tensor = BAD[case]
    layer, name = name.split(".", 1)
    error = loader("model", expert_dtype).load(f"layers.{layer}", {name: tensor})
    named = f"layers.{layer}.{name} " in error
    assert named, f"{case} is served, or the error names no tensor: {error!r}"


def test_fp8_beside_experts_in_mxfp4() -> None:
    """Only the experts of such a checkpoint are quantized."""
    described = quantizations.KINDS["experts in MXFP4"][0]
    name = f"layers.1.{Q}.weight"
    assert f"{name} " in error_of(described, name, weight_of(Q, E4M3))


def test_another_quantization_comes_through() -> None:
    """Each tensor once."""
    kind = "FP8 by rows"
    for leaf, tensor in quantizations.stored(kind, *SHAPES[Q]).items():
        described = quantizations.KINDS[kind][0]
        assert error_of(described, f"layers.1.{Q}.{leaf}", tensor) == ""


@pytest.mark.parametrize(
    ("kept", "name", "passes"),
    [
        ("head", Q, False),
        (f"layers.1.{Q}", Q, True),
        (f"model.layers.1.{Q}", Q, True),
        (Q, Q, True),
        ("re:.*attn.*", Q, True),
        ("*.attn.*", Q, True),
        ("layers.1.attn.wq_*", Q, True),
        ("layers.?.attn", Q, True),
        ("layers.?.ffn", Q, False),
        (X, X, False),
    ],
)
def test_a_layer_in_bf16_must_be_listed(kept: str, name: str, passes: bool) -> None:
    """Beside codes in the other half of a fused weight nobody would write its scale."""
    described = quantizations.KINDS["DeepSeek's own"][0] | {"ignored_layers": [kept]}
    error = error_of(
        described, f"layers.1.{name}.weight", weight_of(name, torch.bfloat16)
    )
    assert (f"layers.1.{name}.weight " in error) != passes, error


def test_a_layer_that_is_listed_has_no_other_floats() -> None:
    described = quantizations.KINDS["DeepSeek's own"][0] | {"ignored_layers": [Q]}
    for dtype in (torch.float64, torch.float8_e5m2):
        name = f"layers.1.{Q}.weight"
        assert f"{name} " in error_of(described, name, weight_of(Q, dtype))


@pytest.mark.parametrize(
    ("name", "rows"),
    [(f"layers.1.{Q}", SHAPES[Q][0]), ("layers.1.attn.compressor.wkv", 1024)],
)
def test_more_rows_in_16_bits(name: str, rows: int) -> None:
    """Of a linear layer, and of a ratio-4 layer's compressor; a loader would cut."""
    described = quantizations.KINDS["DeepSeek's own"][0] | {"ignored_layers": [name]}
    name = f"{name}.weight"
    columns = SHAPES[Q][1] if Q in name else HIDDEN
    given = torch.zeros(rows, columns).bfloat16()
    assert error_of(described, name, given) == ""
    assert f"{name} " in error_of(described, name, torch.cat((given, given)))


@pytest.mark.parametrize(("model", "kind"), published.CHECKPOINTS)
def test_every_tensor_as_published_and_no_other(model: str, kind: str) -> None:
    """All come through in their order, the model's and the draft's between each other;
    of another shape or dtype each is refused by name."""
    told = published.config(model, **published.KINDS[kind])
    tensors = published.tensors(model, kind)
    assert list(published.passed(told, tensors)) == list(tensors)
    for name in tensors:
        if published.converted(name, kind):
            continue
        for bad in published.others(name, tensors[name]):
            served = f"{name} is served as {bad.dtype} of {tuple(bad.shape)}"
            assert f"{name} " in published.refusal(told, name, bad), served


@pytest.mark.parametrize("expert", [-1, 4])
def test_a_table_names_experts_that_there_are(expert: int) -> None:
    name, told = "layers.1.ffn.gate.tid2eid", published.config("V4")
    assert f"{name} " in published.refusal(told, name, torch.tensor([[0, expert]]))


@pytest.mark.parametrize(
    ("value", "passes"),
    [(0.0, True), (0.5, True), (-0.5, False), (torch.inf, False), (torch.nan, False)],
)
def test_values_of_float32_scales(value: float, passes: bool) -> None:
    """Beside FP8 experts, where they stay as they are; a block of zeros has a zero."""
    told = published.config("V4", **published.KINDS["FP8 experts"])
    name = "layers.1.attn.wq_a.scale"
    error = published.refusal(told, name, torch.full((2, 3), value))
    assert (error == "") == passes, error
    assert passes or f"{name} " in error


@pytest.mark.parametrize(
    ("described", "keeps"),
    [
        ({"ignore": ["mtp.0.ffn.experts"]}, True),
        ({"ignore": ["re:nothing", "mtp.0*"]}, True),
        ({"ignore": ["re:.*experts$"]}, True),
        ({"ignore": [r"re:.*experts\.\d+"]}, True),
        ({"quantization": {"exclude_modules": ["mtp.0*"]}}, True),
        ({"ignore": ["mtp.1*", "layers.*"]}, False),
    ],
)
def test_a_stage_of_the_draft_that_was_not_converted(
    described: dict[str, Any], keeps: bool
) -> None:
    module = layout.module("vllm_xpu_dsv4.checkpoint_config")
    assert module.keeps_draft_experts(described, 0) == keeps


@pytest.mark.unchanged
@pytest.mark.parametrize("name", [f"{Q}.weight", f"{X}.weight", f"{Q}.scale"])
def test_the_model_passes_its_draft_s_tensors_by(name: str) -> None:
    """They may be in another format, and a server without drafts does not read them."""
    given = {name: torch.ones(3, 5).bfloat16()}
    assert loader("model").load("mtp.0", given) == ""


@pytest.mark.unchanged
def test_float32_norms_are_rounded() -> None:
    norm = torch.linspace(0.9, 1.1, HIDDEN)
    assert loader("model").load("layers.1", {"ffn_norm.weight": norm}) == ""
    held = loader("model").parameter("model.layers.1.ffn_norm.weight")
    assert torch.equal(held, norm.bfloat16())
