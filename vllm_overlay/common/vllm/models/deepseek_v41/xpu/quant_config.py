# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization of DeepSeek V4 and V4.1 on XPU."""

from typing import Any

from vllm.model_executor.layers.quantization import QuantizationMethods
from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config
from vllm.models.deepseek_v41.quant_config import (
    DeepseekV4FP8Config as DeepseekV41FP8Config,
)


class DeepseekV4XPUFP8Config(DeepseekV4FP8Config, DeepseekV41FP8Config):  # type: ignore[misc]
    """V4's configuration, which leaves linear layers with scales of 32 x 32 to V4.1's:
    both go by one name."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> QuantizationMethods | None:
        return DeepseekV41FP8Config.override_quantization_method(
            hf_quant_cfg, user_quant, hf_config
        )
