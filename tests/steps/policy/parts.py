# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 refuses a checkpoint that lacks a scale or a part, and names it."""

from collections.abc import Iterable

import pytest
import torch
from helpers.loading import NAME, Model, message


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
    found = message(monkeypatch, tensors, dtype, "model")
    assert f"no scale for {NAME}" in found, found


def test_a_weight_that_is_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, {NAME: torch.ones(4, 4)}, torch.float8_e4m3fn, "model")
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
    "the scale of words": (
        "no scale for layers.0.ffn.experts.0.w1.qweight",
        WHOLE | {"layers.0.ffn.experts.0.w1.qweight": torch.zeros(1).int()},
    ),
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
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, "model", Sparse)
    assert name in found, f"{name} is not named: {found!r}"
    assert found.startswith("The checkpoint ")


@pytest.mark.parametrize(("lacking", "more"), [(5, ""), (6, " and 1 more")])
def test_many_are_lacking(
    monkeypatch: pytest.MonkeyPatch, lacking: int, more: str
) -> None:
    """The first five are named."""
    names = [f"layers.{layer}.ffn.experts.0.w1" for layer in range(lacking)]
    tensors = WHOLE | {f"{name}.scale": SCALE for name in names}
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, "model", Sparse)
    listed = ", ".join(f"{name}.weight" for name in names[:5])
    assert found == f"The checkpoint lacks {listed}{more}"


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
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, "draft", Draft)
    assert name.removesuffix(".scale") in found, f"assert {name} in {found!r}"
    assert found.startswith("The checkpoint's draft ")


@pytest.mark.unchanged
def test_a_whole_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own tensors may be incomplete."""
    tensors = {"layers.0.part.scale": SCALE} | DRAFT
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, "draft", Draft)
    assert found == ""


class Owner(Draft):
    """Has a sink, too, and an indexer that normalizes keys."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.attn = torch.nn.Module()
        self.attn.attn_sink = torch.nn.Parameter(torch.zeros(1), False)
        self.attn.indexer = torch.nn.Module()
        self.attn.indexer.k_norm = torch.nn.RMSNorm(1)


class KeyOwner(Owner):
    """Makes the keys itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.attn.indexer.wk = torch.nn.Linear(1, 1, bias=False)


OWNED = {
    NAME: FP8,
    "part.scale": SCALE,
    "attn.attn_sink": SCALE,
    "embed_tokens.weight": SCALE,
    # Of a layer whose parts have other names.
    "layers.0.attn.wo_b.weight": SCALE,
}
KEYS = {"attn.indexer.wk.weight": SCALE}


@pytest.mark.unchanged
def test_a_layer_need_not_normalize_keys_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = (torch.float8_e4m3fn, "model", Owner)
    assert message(monkeypatch, OWNED, *arguments) == ""


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("embed_tokens.weight", Owner),
        ("attn.attn_sink", Owner),
        ("attn.indexer.k_norm.weight", KeyOwner),
    ],
)
def test_a_parameter_of_its_own_is_lacking(
    monkeypatch: pytest.MonkeyPatch, name: str, made: type[Model]
) -> None:
    """A draft has its model's embedding, and all else itself."""
    given = OWNED | (KEYS if made is KeyOwner else {})
    given = {found: tensor for found, tensor in given.items() if found != name}
    arguments = (torch.float8_e4m3fn, "model", made)
    assert f"lacks {name}" in message(monkeypatch, given, *arguments)
    given = {f"mtp.0.{name}": tensor for name, tensor in given.items()}
    found = message(monkeypatch, given, torch.float8_e4m3fn, "draft", made)
    assert (f"lacks {name}" in found) == (name != "embed_tokens.weight"), found


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
    arguments = (COMPRESSORS, torch.float8_e4m3fn, "model", Gated)
    found = message(monkeypatch, *arguments)
    assert found == "The checkpoint lacks layers.0.compressor.wgate.weight"


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
    arguments = (torch.float8_e4m3fn, "model", Sparse, {0, 1})
    assert message(monkeypatch, tensors, *arguments) == ""


def test_a_weight_of_the_rank_s_own_expert_is_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = experts_without("1.w2.weight")
    arguments = (torch.float8_e4m3fn, "model", Sparse, {0, 1})
    found = message(monkeypatch, tensors, *arguments)
    assert "layers.1.ffn.experts.1.w2.weight" in found


@pytest.mark.unchanged
def test_a_draft_s_tensors_may_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself does not load them."""
    tensors = WHOLE | {"mtp.0.ffn.experts.0.w1.scale": SCALE}
    arguments = (tensors, torch.float8_e4m3fn, "model", Sparse)
    assert message(monkeypatch, *arguments) == ""


@pytest.mark.unchanged
def test_a_checkpoint_that_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        NAME: torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "part.scale": torch.ones(1),
    }
    found = message(monkeypatch, tensors, torch.float8_e4m3fn, "model")
    assert found == ""


@pytest.mark.unchanged
def test_other_models_may_have_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {NAME: torch.zeros(4, 4, dtype=torch.int8)}
    assert message(monkeypatch, tensors, torch.int8, "another") == ""
