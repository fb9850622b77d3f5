# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of DeepSeek-V4 and its router, from the installed vLLM."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import layout, model_configs

GATE_LINEAR = f"{layout.FUSED_MOE}.router.gate_linear"


def _in_bf16() -> Any:
    utilities = layout.module("vllm.utils.torch_utils")
    return utilities.set_default_torch_dtype(torch.bfloat16)


def experts(config: Any, layer: int = 1) -> Any:
    """The router, the routed and the shared experts of a layer, not loaded."""
    with model_configs.current(config), _in_bf16():
        model = layout.module(layout.MODEL)
        return model.DeepseekV4MoE(config, prefix=f"model.layers.{layer}.ffn")


def gate(inputs: int, outputs: int, **options: Any) -> Any:
    """A router of random BF16 weights, in the class that the model takes."""
    with model_configs.current(model_configs.vllm_config()), _in_bf16():
        kind = layout.module(GATE_LINEAR).GateLinear
        made = kind(inputs, outputs, prefix="model.layers.1.ffn.gate", **options)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    with pytest.MonkeyPatch.context() as patch:
        # A CPU that has AMX would ask for an op that vLLM compiles for CPUs alone.
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        made.quant_method.process_weights_after_loading(made)
    return made


def pretend(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Make a router, when it is built, see another platform: "CUDA" of capability 9.0,
    "ROCm" or "CPU"."""
    cuda, rocm = platform == "CUDA", platform == "ROCm"
    answers = SimpleNamespace(
        is_cuda=lambda: cuda,
        is_rocm=lambda: rocm,
        is_cuda_alike=lambda: cuda or rocm,
        is_xpu=lambda: False,
        is_device_capability=lambda capability: cuda and capability == (9, 0),
        is_device_capability_family=lambda family: False,
    )
    rocm_module = SimpleNamespace(on_gfx950=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm_module)
    monkeypatch.setattr(layout.module(GATE_LINEAR), "current_platform", answers)


def rocm_multiplies_into_float32() -> bool:
    """Whether the release lets ROCm take the product with a float32 result too."""
    return layout.RELEASE >= (0, 31)


def run_rank(
    rank: int,
    ranks: int,
    num_experts: int,
    w13: tuple[torch.Tensor, torch.Tensor],
    w2: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """What one rank of an expert-parallel group adds to the result, `[T, hidden]`.

    `w13` and `w2` are MXFP4 weights and scales of all experts; the rank has those that
    vLLM's own map gives it.
    """
    moe = layout.module(f"{layout.FUSED_MOE}.config")
    oracle = layout.module(f"{layout.FUSED_MOE}.oracle.mxfp4")
    manager = layout.module(f"{layout.FUSED_MOE}.expert_map_manager")
    activation = layout.module(f"{layout.FUSED_MOE}.activation").MoEActivation.SILU
    local, expert_map, _ = manager.determine_expert_map(ranks, rank, num_experts)
    own = slice(None) if expert_map is None else expert_map >= 0
    hidden, inter = w2[0].shape[1], w2[0].shape[2] * 2
    parallel = dataclasses.replace(
        moe.FusedMoEParallelConfig.make_no_parallel(),
        ep_size=ranks,
        ep_rank=rank,
        use_ep=ranks > 1,
    )
    names = {field.name for field in dataclasses.fields(moe.FusedMoEConfig)}
    whole = "intermediate_size" in names
    config = moe.FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=topk_ids.shape[1],
        hidden_dim=hidden,
        **{"intermediate_size" if whole else "intermediate_size_per_partition": inter},
        num_local_experts=local,
        num_logical_experts=num_experts,
        activation=activation,
        device=layout.device(),
        routing_method=moe.RoutingMethodType.Default,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    device = layout.device()
    backend = oracle.Mxfp4MoeBackend.XPU
    quantization = oracle.make_mxfp4_moe_quant_config(
        backend, w1_scale=w13[1][own].to(device), w2_scale=w2[1][own].to(device)
    )
    made = oracle.backend_to_kernel_cls(backend)[0](config, quantization)
    output = torch.empty_like(x, device=device)
    made.apply(
        output=output,
        hidden_states=x.to(device),
        w1=w13[0][own].to(device),
        w2=w2[0][own].to(device),
        topk_weights=topk_weights.to(device),
        topk_ids=topk_ids.to(device),
        activation=activation,
        global_num_experts=num_experts,
        expert_map=None if expert_map is None else expert_map.to(device),
        a1q_scale=None,
        a2_scale=None,
        workspace13=torch.empty(0, device=device),
        workspace2=torch.empty(0, device=device),
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return output.cpu()
