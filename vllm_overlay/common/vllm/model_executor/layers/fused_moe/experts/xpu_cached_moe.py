# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed MXFP4 experts in host memory, with slots for some of them on an Intel GPU."""

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.kernels.xpu_dsv4.moe.expert_cache import (
    ExpertCache,
    Weights,
    cached_experts,
    cached_workspace_size,
    make_expert_cache,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.expert_cache import (
    expert_cache_size,
    num_slots,
)
from vllm.model_executor.layers.fused_moe.experts.xpu_triton_moe import (
    XPUTritonExpertsMxFp4,
)
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor


class XPUCachedExpertsMxFp4(XPUTritonExpertsMxFp4):
    """Two launches more a layer than with experts on the device, none of which waits
    for the host."""

    cache: ExpertCache
    most_slots: int
    """Of which a workspace is asked for while nobody knows how many fit."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        w13, w13_scale, w2, w2_scale = (
            get_accelerator_view_from_cpu_tensor(part.data)
            for part in (
                layer.w13_weight,
                layer.w13_weight_scale,
                layer.w2_weight,
                layer.w2_weight_scale,
            )
        )
        host = w13, w13_scale, w2, w2_scale
        expert_bytes = sum(part[0].numel() for part in host)
        slots = num_slots(layer.layer_name, self.moe_config, expert_bytes)
        self.take_slots(host, slots)
        if expert_cache_size() < 0:
            self.most_slots = self.moe_config.num_experts

    def drop_slots(self) -> Weights:
        """Free the device's memory; what is left is on the host."""
        host = self.cache.host
        del self.cache
        return host

    def take_slots(self, host: Weights, slots: int) -> None:
        """Allocate slots on the device, which are empty."""
        device = torch.device(current_platform.device_type)
        self.cache = make_expert_cache(host, slots, device)
        self.most_slots = slots

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        sizes = (M, topk, local_num_experts, self.most_slots, K, N // 2)
        size = cached_workspace_size(*sizes)
        # A workspace has elements of bf16.
        return (cdiv(size, 2),), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ):
        assert not apply_router_weight_on_input and expert_map is None
        cached_experts(
            hidden_states,
            self.cache,
            topk_weights,
            topk_ids,
            self.limit,
            out=output,
            workspace=workspace13.view(torch.uint8),
        )
