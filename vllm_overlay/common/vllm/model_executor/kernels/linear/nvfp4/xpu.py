# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from typing import cast

import torch

from vllm.model_executor.kernels.xpu_dsv4.linear.nvfp4_linear import nvfp4_linear
from vllm.model_executor.layers.quantization.utils.bmm_utils import unpack_bmm_weight
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from .base import NvFp4LinearKernel, NvFp4LinearLayerConfig


def _xpu_nvfp4_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: torch.Tensor,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


# torch.compile does not enter an op: the tile follows each batch's own size.
direct_register_custom_op(
    op_name="xpu_nvfp4_linear",
    op_func=nvfp4_linear,
    fake_impl=_xpu_nvfp4_linear_fake,
)


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
        # The kernel reads the layout of the checkpoint.
        if getattr(layer, "is_bmm", False):
            unpack_bmm_weight(layer, self.apply_weights)

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.ops.vllm.xpu_nvfp4_linear(
            x.reshape(-1, x.shape[-1]).to(torch.bfloat16),
            cast(torch.Tensor, layer.weight),
            cast(torch.Tensor, layer.weight_scale),
            cast(torch.Tensor, layer.weight_global_scale),
        )
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).view(*x.shape[:-1], out.shape[-1])
