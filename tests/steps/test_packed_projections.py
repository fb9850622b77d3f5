# SPDX-License-Identifier: Apache-2.0
"""A packed checkpoint: the projections of compressor and indexer stay packed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layer_parts, layout, model_configs, model_layers, packed_formats

HIDDEN, RANK, TOKENS = 256, 128, 5
# Of each projection: its columns in the checkpoint and its rows' size.
PROJECTIONS = {
    "compressor.wkv": (1024, HIDDEN),
    "compressor.wgate": (1024, HIDDEN),
    "indexer.compressor.wkv": (256, HIDDEN),
    "indexer.compressor.wgate": (256, HIDDEN),
    "indexer.weights_proj": (64, HIDDEN),
    "indexer.wq_b": (64 * 128, RANK),
    "wq_a": (RANK, HIDDEN),
    "wkv": (512, HIDDEN),
}
# Projections that vLLM's model merges, and their place there.
MERGED = {
    "compressor.wkv": ("compressor.fused_wkv_wgate", 0),
    "compressor.wgate": ("compressor.fused_wkv_wgate", 1),
    "wq_a": ("fused_wqa_wkv", 0),
    "wkv": ("fused_wqa_wkv", 1),
}


FORMATS: dict[str, Any] = {
    "nvfp4": packed_formats.Nvfp4(),
    "mxfp4": packed_formats.Mxfp4(),
    "int4": packed_formats.Int4(),
}


def write_checkpoint(path: Path, packing: Any) -> dict[str, torch.Tensor]:
    """Random packed projections; what each stands for, in float64."""
    stored: dict[str, torch.Tensor] = {}
    meaning = {}
    for name, (columns, size) in PROJECTIONS.items():
        made, meaning[name] = packed_formats.random(packing, columns, size)
        stored.update({f"{name}.{kind}": tensor for kind, tensor in made.items()})
    torch.save(stored, path)
    return meaning


def load(layer: Any, path: Path) -> None:
    """Load the checkpoint as the model does, through each parameter's own loader."""
    from vllm.model_executor.model_loader import weight_utils

    owner = layer_parts.projecting(layer)
    parameters = dict(owner.named_parameters())
    for name, tensor in weight_utils.pt_weights_iterator([str(path)], False):
        module, _, kind = name.rpartition(".")
        prefix = "indexer." if module.startswith("indexer.") else ""
        merged, *place = MERGED.get(module.removeprefix("indexer."), (module,))
        target = prefix + merged if place else module
        parameter = parameters[f"{target}.{kind}"]
        parameter.weight_loader(parameter, tensor, *place)
    for module in owner.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def loaded(directory: Path, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A ratio-4 layer with a checkpoint of that format; what its weights stand for."""
    torch.manual_seed(0)
    path = directory / f"{name}.pt"
    meaning = write_checkpoint(path, FORMATS[name])
    config = model_configs.vllm_config()
    FORMATS[name].take(config, leave_out=["wo_a", "wo_b", "attn.wq_b"])
    layer = model_layers.attention_layer(config, 4)
    with model_configs.current(config):
        load(layer, path)
    return layer, meaning


def off_by(got: torch.Tensor, *wanted: torch.Tensor) -> float:
    whole = torch.cat(wanted, -1)
    return float((got.cpu().double() - whole).norm() / whole.norm())


@pytest.mark.parametrize("name", layout.PACKED_FORMATS)
def test_every_projection_multiplies_what_is_packed(name: str, tmp_path: Path) -> None:
    built, meaning = loaded(tmp_path, name)
    seen = FORMATS[name].seen
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    got = layer_parts.input_projections(built, hidden.to(layout.device()))
    wanted = {
        projection: seen(hidden) @ weight.T
        for projection, weight in meaning.items()
        if weight.shape[1] == HIDDEN
    }
    qr_kv, kv_score, indexer_kv_score, indexer_weights = got
    assert kv_score.dtype == indexer_kv_score.dtype == torch.float32
    errors = {
        "compressor": off_by(
            kv_score, wanted["compressor.wkv"], wanted["compressor.wgate"]
        ),
        "indexer's compressor": off_by(
            indexer_kv_score,
            wanted["indexer.compressor.wkv"],
            wanted["indexer.compressor.wgate"],
        ),
        "indexer's weights": off_by(indexer_weights, wanted["indexer.weights_proj"]),
        "attention": off_by(qr_kv, wanted["wq_a"], wanted["wkv"]),
    }
    qr = torch.randn(TOKENS, RANK).bfloat16()
    query = layer_parts.projecting(built).indexer.wq_b(qr.to(layout.device()))[0]
    errors["indexer's queries"] = off_by(query, seen(qr) @ meaning["indexer.wq_b"].T)
    assert max(errors.values()) < 3e-3, f"projections are off by {errors}"


def test_the_weights_stay_packed(tmp_path: Path) -> None:
    compressor = layer_parts.projecting(loaded(tmp_path, "nvfp4")[0]).compressor
    assert compressor.fused_wkv_wgate.weight.dtype == torch.uint8


@pytest.fixture
def bf16() -> Iterator[None]:
    """Parameters are made in the model's dtype, as vLLM's loader does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_an_fp8_checkpoint_keeps_them_in_bf16() -> None:
    config = model_configs.vllm_config(quantized=True)
    built = layer_parts.projecting(model_layers.attention_layer(config, 4))
    dtypes = {
        "compressor": built.compressor.fused_wkv_wgate.weight.dtype,
        "indexer's compressor": built.indexer.compressor.fused_wkv_wgate.weight.dtype,
        "indexer's weights": built.indexer.weights_proj.weight.dtype,
        "indexer's queries": built.indexer.wq_b.weight.dtype,
    }
    queries = dtypes.pop("indexer's queries")
    assert queries == torch.float8_e4m3fn, "nothing is in FP8"
    assert set(dtypes.values()) == {torch.bfloat16}, dtypes


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_projections_in_bf16_keep_fp32_results() -> None:
    torch.manual_seed(1)
    built = model_layers.attention_layer(model_configs.vllm_config(), 4)
    linear = layer_parts.projecting(built).compressor.fused_wkv_wgate
    linear.weight.data.normal_()
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    score = layer_parts.input_projections(built, hidden.to(layout.device()))[1]
    assert score.dtype == torch.float32
    assert off_by(score, hidden.double() @ linear.weight.cpu().double().T) < 1e-6


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_other_platforms_keep_them_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_configs.vllm_config(quantized=True)
    layer = model_layers.attention_layer(config, 4)
    module = sys.modules[type(layer_parts.projecting(layer).compressor).__module__]
    other = layout.another_platform(module.current_platform)
    monkeypatch.setattr(module, "current_platform", other)
    config = model_configs.vllm_config(quantized=True)
    built = layer_parts.projecting(model_layers.attention_layer(config, 4))
    for linear in (built.compressor.fused_wkv_wgate, built.indexer.weights_proj):
        assert linear.weight.dtype == torch.bfloat16
