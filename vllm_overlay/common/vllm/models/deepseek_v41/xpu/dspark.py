# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DSpark's draft of DeepSeek V4.1 on XPU: the layers of XPU's model."""

import torch
from torch import nn

from ..nvidia import dspark
from .model import DeepseekV41XPUDecoderLayer


class DSparkXPUModel(dspark.DSparkDeepseekV4Model):
    layer_cls = DeepseekV41XPUDecoderLayer

    def insert_kv(
        self,
        attn: nn.Module,
        kv: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        window = attn.swa_cache_layer
        torch.ops.vllm.xpu_deepseek_qnorm_rope_kv_insert(
            kv.new_empty(kv.shape[0], 0, kv.shape[1]),
            kv,
            window.kv_cache,
            slot_mapping,
            positions,
            attn.rotary_emb.cos_sin_cache,
            attn.eps,
            window.block_size,
            attn.norms_query,
        )


class DSparkDeepseekV4ForCausalLM(dspark.DSparkDeepseekV4ForCausalLM):
    model_cls = DSparkXPUModel
