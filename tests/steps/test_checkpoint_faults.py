# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that cannot be loaded is refused; the message names what is wrong."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

LOADER = "vllm.model_executor.model_loader.default_loader"
NAME = "part.weight"
LAST = "rest.weight"


class Model(torch.nn.Module):
    """One linear layer, loaded as vLLM's own models are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4, bias=False)
        self.part.weight = torch.nn.Parameter(torch.zeros(4, 4).to(dtype), False)
        self.part.scale = torch.nn.Parameter(torch.zeros(1), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = layout.module("vllm.model_executor.models.utils").AutoWeightsLoader
        loaded: set[str] = loader(self).load_weights(weights)
        return loaded


class Sparse(Model):
    """A layer with a sink, and experts that a loader of its own takes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.attn_sink = torch.nn.Parameter(torch.zeros(1), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(
            (name, tensor) for name, tensor in weights if "experts" not in name
        )


def deepseek_v4() -> Any:
    registry = layout.module("vllm.model_executor.models.registry")
    return registry.ModelRegistry.models["DeepseekV4ForCausalLM"].load_model_cls()


def message(
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    owner: Any = None,
    made: type[Model] = Model,
    local_experts: set[int] | None = None,
) -> str:
    """The error of loading these tensors; empty without one."""
    kind = layout.module(LOADER).DefaultModelLoader
    config = model_configs.vllm_config()
    config.model_config.quantization = "fp8"
    config.model_config.multimodal_config = None
    model = made(dtype)
    if hasattr(owner, "requires_scales"):
        model.requires_scales = owner.requires_scales

    def given(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    with model_configs.current(config):
        loader = kind(config.load_config)
        monkeypatch.setattr(loader, "get_all_weights", given)
        loader.counter_before_loading_weights = 0.0
        monkeypatch.setattr(loader, "_init_ep_weight_filter", lambda _: None)
        loader.local_expert_ids = local_experts
        try:
            loader.load_weights(model, config.model_config)
        except Exception as error:
            return str(error)
    return ""


def test_a_wrong_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(
        monkeypatch, {"part.scale": torch.ones(1), NAME: torch.ones(2, 4).bfloat16()}
    )
    assert NAME in found and "(2, 4)" in found, found


def test_a_name_that_the_model_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, {"part.strange": torch.ones(2)})
    assert "part.strange (torch.float32, (2,))" in found, found
    assert "named 'part.strange'" in found, found
    assert NAME not in found, f"the other parameters are listed: {found}"


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
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_too_little_memory_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """It is no fault of the file."""

    class Full(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            for _ in weights:
                raise kind("too little")
            return set()

    assert message(monkeypatch, {NAME: FP8}, made=Full) == "too little"


def refusal(shard: Path, size: int | None = None, first: bytes = b"") -> str:
    """The error of reading a shard of two tensors of 16,384 bytes each that ends at
    `size`, and whose first bytes are replaced."""
    from safetensors.torch import save_file

    utils = layout.module("vllm.model_executor.model_loader.weight_utils")
    save_file({NAME: torch.zeros(64, 64), LAST: torch.zeros(64, 64)}, shard)
    data = shard.read_bytes()
    shard.write_bytes((first + data[len(first) :])[:size])
    with pytest.raises(Exception) as stop:
        list(utils.safetensors_weights_iterator([str(shard)], False))
    return str(stop.value)


def test_a_truncated_shard(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    found = refusal(shard, -8)
    assert shard.name in found, found
    assert f"ends before the end of {LAST}" in found, found
    assert f"ends before the end of {NAME}" in refusal(shard, -16384 - 8)


@pytest.mark.parametrize(
    ("size", "first"),
    [(4, b""), (40, b""), (None, b"\x40"), (None, b"\xff" * 8)],
    ids=["no length", "no header", "another length", "a length beyond all"],
)
def test_a_shard_with_a_damaged_header(
    tmp_path: Path, size: int | None, first: bytes
) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    assert shard.name in refusal(shard, size, first)


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
