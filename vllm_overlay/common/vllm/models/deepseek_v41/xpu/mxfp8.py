# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inputs of DeepSeek V4.1's MXFP8 layers on XPU, quantized in one launch or by the
norm before."""

from dataclasses import dataclass

import torch
from torch import nn

from vllm.model_executor.kernels.linear.mxfp8.xpu import XPUMxFp8LinearKernel
from vllm.model_executor.kernels.xpu_dsv4.linear.mxfp8_quant import (
    mxfp8_quantize,
    q_kv_norm_mxfp8,
)
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms import current_platform


def takes_mxfp8(linear: nn.Module) -> bool:
    """Whether a linear layer's product takes rows that are quantized already."""
    kernel = getattr(getattr(linear, "quant_method", None), "kernel", None)
    return isinstance(kernel, XPUMxFp8LinearKernel)


def quantized_rows(x: torch.Tensor) -> QuantizedActivation:
    """`[num_tokens, ...]` as one row for each token."""
    codes, scales = mxfp8_quantize(x)
    return QuantizedActivation(codes, scales, x.dtype, codes.shape, kMxfp8Dynamic)


def quantized_query(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
) -> tuple[QuantizedActivation, torch.Tensor]:
    """The normed latent of the query, quantized, and the normed key."""
    codes, scales, kv = q_kv_norm_mxfp8(qr, kv, q_weight, kv_weight, eps)
    return QuantizedActivation(codes, scales, qr.dtype, qr.shape, kMxfp8Dynamic), kv


@dataclass(frozen=True)
class Mxfp8Key:
    hidden_size: int
    q_size: int
    kv_size: int
    groups: int
    group_size: int
    weight_dtype: torch.dtype
    eps: float


class XPUMxfp8Kernel(VllmJitKernel[Mxfp8Key]):
    """The rows of an attention layer's linear layers."""

    def get_warmup_keys(self, attn: nn.Module) -> list[Mxfp8Key]:
        return [
            Mxfp8Key(
                attn.hidden_size,
                attn.q_lora_rank,
                attn.head_dim,
                attn.n_local_groups,
                attn.o_lora_rank,
                attn.q_norm.weight.dtype,
                attn.eps,
            )
        ]

    def compile(self, compile_key: Mxfp8Key) -> None:
        device = current_platform.device_type
        q_size, kv_size = compile_key.q_size, compile_key.kv_size

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        mxfp8_quantize(zeros(1, compile_key.hidden_size))
        # As the batched product of wo_a gives them.
        product = zeros(compile_key.groups, 1, compile_key.group_size)
        mxfp8_quantize(product.transpose(0, 1))
        qr, kv = zeros(1, q_size + kv_size).split([q_size, kv_size], dim=-1)
        q_weight, kv_weight = (
            zeros(n).to(compile_key.weight_dtype) for n in (q_size, kv_size)
        )
        q_kv_norm_mxfp8(qr, kv, q_weight, kv_weight, compile_key.eps)


XPU_MXFP8_KERNEL = XPUMxfp8Kernel()
