# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from typing import cast

import torch

from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from .base import NvFp4LinearKernel, NvFp4LinearLayerConfig


class XPUNvFp4LinearKernel(NvFp4LinearKernel):
    """Weight-only NVFP4 GEMM on XPU: weights stay packed, activations stay bf16.

    A checkpoint's activation scales are not used: activations are not quantized, which
    loses less than the checkpoint's own scheme.
    """

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if not current_platform.is_xpu():
            return False, "XPUNvFp4 only support on XPU"
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The kernel reads the layout of the checkpoint."""
        if getattr(layer, "is_bmm", False):
            # It has no batch: the owner of such a layer multiplies by its weight
            # itself. The product with the identity is that weight in bf16.
            weight = cast(torch.Tensor, layer.weight)
            identity = torch.eye(
                2 * weight.shape[1], dtype=torch.bfloat16, device=weight.device
            )
            dense = self.apply_weights(layer, identity).t().contiguous()
            replace_parameter(layer, "weight", dense)
            del layer.weight_scale, layer.weight_global_scale

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from vllm.v1.attention.ops.xpu_dsv4.nvfp4_linear import nvfp4_linear

        out = nvfp4_linear(
            x.reshape(-1, x.shape[-1]).to(torch.bfloat16),
            cast(torch.Tensor, layer.weight),
            cast(torch.Tensor, layer.weight_scale),
            cast(torch.Tensor, layer.weight_global_scale),
        )
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).view(*x.shape[:-1], out.shape[-1])
