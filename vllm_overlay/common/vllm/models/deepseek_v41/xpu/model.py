# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek V4.1 on XPU: the layers of NVIDIA's model with XPU's attention."""

from vllm.config import VllmConfig

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
