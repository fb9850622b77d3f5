# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of a built attention layer; releases differ in which object owns
them."""

from types import ModuleType
from typing import Any

import pytest
import torch

from . import layout


def open_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call attention and indexer directly as Python functions instead of through
    `torch.ops`, which hides their work from tracing. Where attention is no op, the
    layer already calls it as a method."""
    for home, name in (
        (layout.ATTENTION, "deepseek_v4_attention"),
        ("vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer"),
    ):
        if function := getattr(layout.module(home), name, None):
            monkeypatch.setattr(torch.ops.vllm, name, function)


def input_projections(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a layer projects `hidden` to: (q rank and kv, kv and score of the
    compressor, those of the indexer's compressor, the indexer's head weights)."""
    owner = projecting(layer)
    for name in ("attn_gemm_parallel_execute", "_run_parallel_input_projections"):
        if hasattr(owner, name):
            projected: tuple[torch.Tensor, ...] = getattr(owner, name)(hidden)
            return projected
    raise AttributeError(f"{type(owner).__name__} has no input projections")


def projecting(layer: Any) -> Any:
    """The part of `layer` that projects, norms and rotates, and inserts keys."""
    return getattr(layer, "mla_attn", layer)


def attending(layer: Any) -> Any:
    """The part of `layer` that owns the caches and attends to them."""
    return getattr(projecting(layer), "mla_attn", projecting(layer))


def attend(layer: Any) -> Any:
    """Attention of `attending(layer)` as a function of q, kv, positions, output."""
    part = attending(layer)
    return getattr(part, "forward_mqa", part)


def unwired(layer: Any) -> Any:
    """As `attend`. On a tree whose layer does not call the decode and prefill modules
    yet, this calls the modules directly."""
    part = attending(layer)
    names = ("xpu_sparse_decode", "xpu_sparse_prefill")
    files = layout.PACKAGE / "v1/attention/backends/mla"
    present = [name for name in names if (files / f"{name}.py").is_file()]
    if not present or (files / "xpu_sparse_attention.py").is_file():
        return attend(layer)
    parts = {name: layout.module(f"{layout.MLA}.{name}") for name in present}
    return lambda q, kv, positions, output: _attend_by(parts, part, q, output)


def _attend_by(
    parts: dict[str, ModuleType], layer: Any, q: torch.Tensor, output: torch.Tensor
) -> None:
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    decode, prefill = parts["xpu_sparse_decode"], parts.get("xpu_sparse_prefill")
    if metadata is None:
        decode.decode_workspace(layer)
        if prefill:
            prefill.prefill_workspace(layer)
        return
    window, own = metadata[layer.swa_cache_layer.prefix], metadata.get(layer.prefix)
    split = window.num_decode_tokens
    if split:
        decode.sparse_decode(layer, q[:split], window, own, output[:split])
    if prefill and window.num_prefill_tokens:
        prefill.sparse_prefill(layer, q[split:], window, own, output[split:])


def insert_keys(
    layer: Any,
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    metadata: dict[str, Any],
) -> torch.Tensor:
    """The queries after `layer`, which `projecting` gave, normalized and rotated them
    and inserted the keys: what it returns, or `q` itself. No public method does it."""
    queries = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
    return q if queries is None else queries


def finish_loading(layer: Any) -> None:
    """Let the layer itself process its weights, as vLLM's loader does with attention
    layers when the weights of all its parts are processed."""
    base = layout.module("vllm.model_executor.layers.attention_layer_base")
    process = getattr(layer, "process_weights_after_loading", None)
    if isinstance(layer, base.AttentionLayerBase) and process is not None:
        process(torch.bfloat16)


def o_projection(layer: Any, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The layer's inverse RoPE, grouped product with wo_a, and wo_b; where a wrapper
    does it, in its forward, with the attention replaced by its output `o`."""
    if layout.WITH_XPU_FOLDER:
        return layer._o_proj(o, positions)
    wrapper = layer.mla_attn
    wrapper.wo_b = layer.wo_b

    def attention(hidden: torch.Tensor, at: torch.Tensor, out: Any, name: str) -> None:
        out[:, : o.shape[1]] = o

    hidden = torch.empty(len(o), wrapper.hidden_size, dtype=o.dtype, device=o.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.vllm, "deepseek_v4_attention", attention)
        return wrapper(positions, hidden)
