# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hyper-connections with delayed gates on XPU, as custom ops.

An op has the signature of the function behind it, which describes the arguments.
"""

import torch

from vllm.model_executor.kernels.xpu_dsv4.mhc.mhc_delayed import (
    mhc_fused_post_pre_delayed,
    mhc_pre_delayed,
)
from vllm.utils.torch_utils import direct_register_custom_op


def _mhc_pre_delayed_fake(
    residual: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, hc_mult, hidden_size = residual.shape
    return (
        residual.new_empty((num_tokens, hc_mult, 1), dtype=torch.float32),
        residual.new_empty((num_tokens, hc_mult, hc_mult), dtype=torch.float32),
        residual.new_empty((num_tokens, hidden_size)),
        residual.new_empty((num_tokens, hc_mult), dtype=torch.float32),
    )


def _mhc_fused_post_pre_delayed_fake(
    x: torch.Tensor, residual: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mixed = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return mixed, *_mhc_pre_delayed_fake(mixed)


direct_register_custom_op(
    op_name="mhc_pre_delayed_xpu",
    op_func=mhc_pre_delayed,
    fake_impl=_mhc_pre_delayed_fake,
)
direct_register_custom_op(
    op_name="mhc_fused_post_pre_delayed_xpu",
    op_func=mhc_fused_post_pre_delayed,
    fake_impl=_mhc_fused_post_pre_delayed_fake,
)
