# SPDX-License-Identifier: Apache-2.0
"""Real layers and models of DeepSeek-V4, built by the classes of the installed vLLM."""

import dataclasses
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import layout, model_configs


def attention_class() -> type[torch.nn.Module]:
    """The attention layer that the model of this platform builds."""
    model = layout.module(layout.MODEL)
    found = getattr(model, "DeepseekV4XPUAttention", None)
    return found or model.DeepseekV4Attention


def attention_layer(
    config: Any,
    compress_ratio: int,
) -> Any:
    """The attention layer of one kind: 0 (window only), 4 or 128."""
    layer = layout.COMPRESS_RATIOS.index(compress_ratio)
    topk_indices = torch.empty(512, 512, dtype=torch.int32)
    with model_configs.current(config), layout.worker():
        return attention_class()(
            config,
            prefix=f"model.layers.{layer}.attn",
            topk_indices_buffer=topk_indices,
        )


def decoder_layer(
    config: Any, compress_ratio: int, experts: type[torch.nn.Module]
) -> Any:
    """The model's whole layer of one kind, with `experts` for its routed experts: a
    class that takes the config and a prefix."""
    return _with_experts(
        layout.module(layout.MODEL).DeepseekV4DecoderLayer,
        config,
        layout.COMPRESS_RATIOS.index(compress_ratio),
        experts,
    )


def draft_layer(config: Any, experts: type[torch.nn.Module]) -> Any:
    """The draft model's layer (multi-token prediction), as `decoder_layer`."""
    kind = layout.module(layout.MTP).DeepSeekV4MultiTokenPredictorLayer
    return _with_experts(kind, config, len(layout.COMPRESS_RATIOS), experts)


def _with_experts(
    kind: Any, config: Any, layer: int, experts: type[torch.nn.Module]
) -> Any:
    topk_indices = torch.empty(512, 512, dtype=torch.int32)
    with (
        model_configs.current(config),
        layout.worker(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(layout.module(layout.MODEL), "DeepseekV4MoE", experts)
        return kind(
            config,
            prefix=f"model.layers.{layer}",
            topk_indices_buffer=topk_indices,
        )


def decoder_layers(config: Any, count: int, sublayer: type[torch.nn.Module]) -> Any:
    """Decoder layers of the model, with `sublayer` as their attention and experts."""
    model = layout.module(layout.MODEL)
    attention = attention_class().__name__
    with model_configs.current(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, attention, sublayer)
        patch.setattr(model, "DeepseekV4MoE", sublayer)
        layers = [
            model.DeepseekV4DecoderLayer(config, prefix=f"model.layers.{number}")
            for number in range(count)
        ]
    for layer in layers:
        for norm in (layer.attn_norm, layer.ffn_norm):
            norm.forward = norm.forward_native
    return layers


def run_layers(layers: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    """The residual streams `x`, `[T, 4, hidden]`, after the layers."""
    positions = torch.arange(len(x), device=x.device)
    if "residual" not in signature(layers[0].forward).parameters:
        for layer in layers:
            x = layer(x, positions, None)
        return x
    state: tuple[Any, ...] = (None, None, None)
    for layer in layers:
        x, residual, *mixes = layer(x, positions, None, *state)
        state = (*mixes, residual)
    if residual is not None:
        x = layers[-1].hc_post(x, residual, *mixes)
    return x


def draft_model(config: Any) -> Any:
    """The MTP draft model of this platform, its weights not loaded."""
    with model_configs.current(config), layout.worker():
        return layout.module(layout.MTP).DeepSeekV4MTP(
            vllm_config=config, prefix="draft"
        )


def compressor(config: Any, *, indexer: bool, ratio: int = 4) -> Any:
    """The compressor of a layer, or of its `indexer`, from that layer."""
    layer = attention_layer(config, ratio)
    owner = layer.indexer if indexer else getattr(layer, "mla_attn", layer)
    return owner.compressor


def hyper_connections() -> Any:
    """What a layer and the model call, as `pre`, `post`, `head`, and `fused` where
    the release has that."""
    mhc = layout.module(layout.MHC)
    if hasattr(mhc, "MHCPreOp"):
        ops = SimpleNamespace(
            pre=mhc.MHCPreOp(), post=mhc.MHCPostOp(), head=mhc.HCHeadOp()
        )
        if hasattr(mhc, "MHCFusedPostPreOp"):
            ops.fused = mhc.MHCFusedPostPreOp()
        return ops
    ops = SimpleNamespace(
        pre=torch.ops.vllm.mhc_pre,
        post=torch.ops.vllm.mhc_post,
        fused=torch.ops.vllm.mhc_fused_post_pre,
        head=layout.module(layout.MODEL).hc_head,
    )
    return ops


def linear(config: Any, inputs: int, outputs: int, *, backend: str = "auto") -> Any:
    """A linear layer under the configuration's quantization, computed by `backend`."""
    layers = layout.module("vllm.model_executor.layers.linear")
    dtype = layout.module("vllm.utils.torch_utils").set_default_torch_dtype(
        torch.bfloat16
    )
    with model_configs.linear_backend(config, backend), dtype:
        return layers.ReplicatedLinear(
            inputs,
            outputs,
            bias=False,
            quant_config=config.quant_config,
            prefix="model.layers.0.attn.wo_b",
        )


def experts_config(
    *,
    activation: str,
    num_experts: int,
    topk: int,
    hidden: int,
    inter: int,
    model_limit: float | None = None,
    **others: Any,
) -> Any:
    """The config of routed experts on one rank. `activation` is a name of
    `MoEActivation`, `others` are more of its fields."""
    moe = layout.module(f"{layout.FUSED_MOE}.config")
    act = layout.module(f"{layout.FUSED_MOE}.activation").MoEActivation[activation]
    names = {field.name for field in dataclasses.fields(moe.FusedMoEConfig)}
    whole = "intermediate_size" in names
    limits = {} if model_limit is None else {"swiglu_limit": model_limit}
    return moe.FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=topk,
        hidden_dim=hidden,
        **{"intermediate_size" if whole else "intermediate_size_per_partition": inter},
        num_local_experts=num_experts,
        num_logical_experts=num_experts,
        activation=act,
        device=layout.device(),
        routing_method=moe.RoutingMethodType.Default,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        **limits,
        **others,
    )


def mxfp4_experts(
    scales: Sequence[torch.Tensor],
    *,
    limit: float | None,
    activation: str,
    num_experts: int,
    topk: int,
    hidden: int,
    inter: int,
    model_limit: float | None = None,
) -> Any:
    """The routed experts of XPU with MXFP4 weights, as a function of hidden
    states, w13, w2, top-k weights and top-k ids.

    `scales` are those of w13 and w2; `activation` is a name of `MoEActivation`. The
    quantization's config carries `limit`, that of the experts `model_limit`.
    """
    oracle = layout.module(f"{layout.FUSED_MOE}.oracle.mxfp4")
    config = experts_config(
        activation=activation,
        num_experts=num_experts,
        topk=topk,
        hidden=hidden,
        inter=inter,
        model_limit=model_limit,
    )
    backend = oracle.Mxfp4MoeBackend.XPU
    quantization = oracle.make_mxfp4_moe_quant_config(
        backend, w1_scale=scales[0], w2_scale=scales[1], swiglu_limit=limit
    )
    experts = oracle.backend_to_kernel_cls(backend)[0](config, quantization)

    def run(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        output = torch.empty_like(x)
        experts.apply(
            output=output,
            hidden_states=x,
            w1=w13,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=config.activation,
            global_num_experts=num_experts,
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=torch.empty(0, device=x.device),
            workspace2=torch.empty(0, device=x.device),
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output

    return run
