# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DSpark's draft of DeepSeek V4.1 on XPU: the layers of XPU's model."""

from ..nvidia import dspark
from .model import DeepseekV41XPUDecoderLayer


class DSparkXPUModel(dspark.DSparkDeepseekV4Model):
    layer_cls = DeepseekV41XPUDecoderLayer


class DSparkDeepseekV4ForCausalLM(dspark.DSparkDeepseekV4ForCausalLM):
    model_cls = DSparkXPUModel
