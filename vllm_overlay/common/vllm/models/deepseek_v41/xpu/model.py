# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek V4.1 on XPU: the layers of NVIDIA's model with XPU's attention."""

from collections.abc import Iterable

import torch

from vllm.config import VllmConfig
from vllm.model_executor.model_loader.deepseek_v4_checkpoint import check_tensors

from ..nvidia import model, vl_model
from .xpu_sparse import DeepseekV41XPUAttention


def _xpu_attn_cls(vllm_config: VllmConfig) -> type[DeepseekV41XPUAttention]:
    return DeepseekV41XPUAttention


class DeepseekV41XPUDecoderLayer(model.DeepseekV4DecoderLayer):
    select_attn_cls = staticmethod(_xpu_attn_cls)


class DeepseekV41XPUModel(model.DeepseekV4Model):
    layer_cls = DeepseekV41XPUDecoderLayer

    @staticmethod
    def make_aux_streams() -> None:
        return None


class DeepseekV41XPULLMForCausalLM(model.DeepseekV41LLMForCausalLM):
    model_cls = DeepseekV41XPUModel


class DeepseekV41ForCausalLM(vl_model.DeepseekV41ForCausalLM):
    language_model_cls = DeepseekV41XPULLMForCausalLM
    requires_scales = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        # A server of the tower alone reads shards that have a part of the text model.
        options = self.multimodal_config
        self.requires_scales = options is None or not options.mm_encoder_only
        return super().load_weights(check_tensors(self.config, weights))
