# SPDX-License-Identifier: Apache-2.0
"""The input projections of a layer, compressor's and indexer's too, from a packed
checkpoint."""

from pathlib import Path
from typing import Any

import torch

from . import layer_parts, layout, model_configs, model_layers, packed_formats

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


def loaded(directory: Path, packing: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A ratio-4 layer with a checkpoint of that format; what its weights stand for."""
    torch.manual_seed(0)
    path = directory / "packed.pt"
    meaning = write_checkpoint(path, packing)
    config = model_configs.vllm_config()
    packing.take(config, leave_out=["wo_a", "wo_b", "attn.wq_b"])
    as_loaded = layout.module("vllm.utils.torch_utils").set_default_torch_dtype
    with as_loaded(torch.bfloat16):
        layer = model_layers.attention_layer(config, 4)
    with model_configs.current(config):
        load(layer, path)
    return layer, meaning


def off_by(got: torch.Tensor, *wanted: torch.Tensor) -> float:
    whole = torch.cat(wanted, -1)
    return float((got.cpu().double() - whole).norm() / whole.norm())


def check(directory: Path, packing: Any) -> None:
    """Hold each projection of such a layer to what its weights stand for."""
    built, meaning = loaded(directory, packing)
    seen = packing.seen
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
