# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stubs for platforms where DeepSeek V4.1 is unsupported."""

from vllm.models.deepseek_v4.common.unsupported import UnsupportedModel
from vllm.platforms import current_platform


class DeepseekV41ForCausalLM(UnsupportedModel):
    message = (
        "DeepSeek-V4.1 (DeepseekV41ForCausalLM) is not supported on "
        f"{current_platform.device_name}; use CUDA or ROCm, or DeepSeek-V4 "
        "(DeepseekV4ForCausalLM)."
    )


class DSparkDeepseekV4ForCausalLM(UnsupportedModel):
    message = (
        "DSpark of DeepSeek-V4.1 (DSparkV41DraftModel) is not supported on "
        f"{current_platform.device_name}; use CUDA or ROCm, or DeepSeek-V4 "
        "(DeepseekV4ForCausalLM)."
    )
