# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek V4.1 on XPU: the layers of NVIDIA's model with XPU's attention and
hyper-connections."""

from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.moe_output import MoEOutput
from vllm.model_executor.layers.mhc import MHCPreDelayedOp

from ..nvidia import model, vl_model
from .xpu_sparse import DeepseekV41XPUAttention


def _xpu_attn_cls(vllm_config: VllmConfig) -> type[DeepseekV41XPUAttention]:
    return DeepseekV41XPUAttention


class DeepseekV41XPUDecoderLayer(model.DeepseekV4DecoderLayer):
    select_attn_cls = staticmethod(_xpu_attn_cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mhc_pre_delayed = MHCPreDelayedOp()

    def mhc_pre(
        self, residual: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        _, *outputs = self.mhc_pre_delayed(residual, *args, **kwargs)
        return tuple(outputs)

    def mhc_post(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
    ) -> torch.Tensor:
        return self.mhc_pre_delayed._post(x, residual, post_layer_mix, comb_res_mix)

    def mhc_shifted_post_pre(  # type: ignore[override]
        self,
        x: torch.Tensor | MoEOutput,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
        *args: Any,
        capture_aux: bool = False,
        stream: None = None,
        reduce_results: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """The mean of the streams comes last, if `capture_aux`. No stream overlaps, and
        no all-reduce is fused here."""
        assert stream is None and not reduce_results
        residual, *outputs = self.mhc_pre_delayed(
            residual,
            *args,
            **kwargs,
            sublayer_out=x,
            post_layer_mix=post_layer_mix,
            comb_res_mix=comb_res_mix,
        )
        aux = residual.mean(dim=1) if capture_aux else residual.new_empty(0)
        return residual, *outputs, aux


class DeepseekV41XPUModel(model.DeepseekV4Model):
    layer_cls = DeepseekV41XPUDecoderLayer

    def mhc_post(self, *args: torch.Tensor) -> torch.Tensor:
        return self.layers[self.end_layer - 1].mhc_post(*args)

    @staticmethod
    def make_aux_streams() -> None:
        return None


class DeepseekV41XPULLMForCausalLM(model.DeepseekV41LLMForCausalLM):
    model_cls = DeepseekV41XPUModel


class DeepseekV41ForCausalLM(vl_model.DeepseekV41ForCausalLM):
    language_model_cls = DeepseekV41XPULLMForCausalLM
