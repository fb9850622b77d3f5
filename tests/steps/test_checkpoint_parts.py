# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 refuses a checkpoint that lacks a scale or a part, and names it."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.loading import NAME, Model, deepseek_v4, message, model_classes


class Sparse(Model):
    """A layer with a sink, and experts that a loader of its own takes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.attn_sink = torch.nn.Parameter(torch.zeros(1), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(
            (name, tensor) for name, tensor in weights if "experts" not in name
        )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_missing_scale(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    tensors = {NAME: torch.zeros(4, 4).to(dtype)}
    found = message(monkeypatch, tensors, dtype, deepseek_v4())
    assert f"no scale for {NAME}" in found, found


def test_a_weight_that_is_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(
        monkeypatch, {NAME: torch.ones(4, 4)}, torch.float8_e4m3fn, deepseek_v4()
    )
    assert "no scale for part.scale" in found, found


FP8 = torch.zeros(4, 4).to(torch.float8_e4m3fn)
SCALE = torch.ones(1)
WHOLE = {NAME: FP8, "part.scale": SCALE, "attn_sink": SCALE}


def experts_without(*lacking: str) -> dict[str, torch.Tensor]:
    """The tensors of two layers of four experts, but for these of the second."""
    return WHOLE | {
        f"layers.{layer}.ffn.experts.{expert}.{part}.{leaf}": SCALE
        for layer in range(2)
        for expert in range(4)
        for part in ("w1", "w2")
        for leaf in ("weight", "scale")
        if not layer
        or not {f"{expert}.{part}.{leaf}", f"{expert}.{part}", str(expert), part}
        & set(lacking)
    }


LACKING: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "a weight": (NAME, {"part.scale": SCALE}),
    "a parameter": ("attn_sink", {NAME: FP8, "part.scale": SCALE}),
    "a part of an expert": (
        "layers.1.ffn.experts.3.w2.scale",
        experts_without("3.w2.scale"),
    ),
    "an expert": ("layers.1.ffn.experts.3.w1.scale", experts_without("3")),
    "a matrix of all experts": (
        "layers.1.ffn.experts.0.w1.scale",
        experts_without("w1"),
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_is_lacking(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, tensors = LACKING[case]
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, deepseek_v4(), Sparse)
    assert name in found, f"{name} is not named: {found!r}"


def test_every_class_is_checked() -> None:
    checked = ", ".join(
        name
        for name, kind in model_classes().items()
        if getattr(kind, "requires_scales", False)
    )
    for name in model_classes():
        assert name in checked


def draft() -> Any:
    """A class that loads the checkpoint's draft."""
    return next(kind for name, kind in model_classes().items() if "MTP" in name)


DRAFT = {
    f"mtp.0.{name}": tensor
    for name, tensor in {
        "part.weight": FP8,
        "part.scale": SCALE,
        "attn.wq_a.weight": SCALE,
        "attn.wkv.weight": SCALE,
        "ffn.shared_experts.w1.weight": SCALE,
        "ffn.shared_experts.w3.weight": SCALE,
        "ffn.experts.0.w1.weight": SCALE,
        "ffn.experts.0.w2.weight": SCALE,
        "ffn.experts.1.w1.weight": SCALE,
        "ffn.experts.1.w2.weight": SCALE,
    }.items()
}


class Draft(Model):
    """Takes all, and has its model's embedding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.embed_tokens = torch.nn.Embedding(1, 1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = {name.removeprefix("mtp.0.") for name, _ in weights}
        return names & {name for name, _ in self.named_parameters()}


@pytest.mark.parametrize("name", DRAFT)
def test_a_draft_lacks_a_tensor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tensors = {"ffn.experts.7.w1.scale": SCALE} | DRAFT
    del tensors[name]
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, draft(), Draft)
    assert name.removesuffix(".scale") in found, f"assert {name} in {found!r}"


@pytest.mark.unchanged
def test_a_whole_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own tensors may be incomplete."""
    tensors = {"layers.0.part.scale": SCALE} | DRAFT
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, draft(), Draft)
    assert found == ""


class Gated(Model):
    """Compressors of which the second has no gate; a third is on another stage."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer, outputs in zip(self.layers, ([4, 4], [4]), strict=True):
            layer.compressor = torch.nn.Module()
            layer.compressor.fused_wkv_wgate = torch.nn.Module()
            layer.compressor.fused_wkv_wgate.output_sizes = outputs

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(
            (name, tensor) for name, tensor in weights if "compressor" not in name
        )


COMPRESSORS = {
    NAME: FP8,
    "part.scale": SCALE,
    **{f"layers.{layer}.compressor.wkv.weight": SCALE for layer in range(3)},
}


def test_a_compressor_lacks_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (COMPRESSORS, torch.float8_e4m3fn, deepseek_v4(), Gated)
    found = message(monkeypatch, *arguments)
    assert "lacks layers.0.compressor.wgate.weight" in found
    assert found.count("wgate") == 1


@pytest.mark.unchanged
def test_weights_of_other_ranks_experts_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --enable-ep-weight-filter the scales of all experts come, and the weights of
    the rank's own."""
    others = {f"{expert}.{part}.weight" for expert in (2, 3) for part in ("w1", "w2")}
    tensors = {
        name: tensor
        for name, tensor in experts_without().items()
        if not any(name.endswith(f".experts.{other}") for other in others)
    }
    arguments = (tensors, torch.float8_e4m3fn, deepseek_v4(), Sparse, {0, 1})
    assert message(monkeypatch, *arguments) == ""


@pytest.mark.unchanged
def test_a_draft_s_tensors_may_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself does not load them."""
    tensors = WHOLE | {"mtp.0.ffn.experts.0.w1.scale": SCALE}
    arguments = (tensors, torch.float8_e4m3fn, deepseek_v4(), Sparse)
    assert message(monkeypatch, *arguments) == ""


@pytest.mark.unchanged
def test_a_whole_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        NAME: torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "part.scale": torch.ones(1),
    }
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, deepseek_v4())
    assert found == ""


@pytest.mark.unchanged
def test_other_models_may_have_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {NAME: torch.zeros(4, 4, dtype=torch.int8)}
    assert message(monkeypatch, tensors, torch.int8) == ""
