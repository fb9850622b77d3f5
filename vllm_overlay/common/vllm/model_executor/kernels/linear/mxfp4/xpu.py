# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from typing import cast

import torch

from vllm.model_executor.layers.quantization.utils.mxfp4_utils import (
    xpu_mxfp4_quantize,
)
from vllm.model_executor.utils import replace_parameter


class XPUMxFp4LinearKernel:
    """MXFP4 GEMM on XPU (W4A4): activations are quantized as the weights are."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # fp4_gemm takes [K, N] weights as a view, and their scales as they lie.
        weight = cast(torch.Tensor, layer.weight).view(torch.float4_e2m1fn_x2)
        replace_parameter(layer, "weight", weight.data.t())
        weight_scale = cast(torch.Tensor, layer.weight_scale)
        weight_scale = weight_scale.view(torch.float8_e8m0fnu)
        replace_parameter(layer, "weight_scale", weight_scale.t().contiguous())

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_fp4, x_blockscale = xpu_mxfp4_quantize(x.reshape(-1, x.shape[-1]))
        output = torch.ops._xpu_C.fp4_gemm(
            x_fp4,
            layer.weight,
            x_blockscale,
            layer.weight_scale,
            x.dtype,
            bias,
        )
        return output.view(*x.shape[:-1], -1)
