# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton hyper-connections on XPU, as custom ops that torch.compile does not enter.

An op has the signature of the function behind it, which describes the arguments. Its
fake, which traces the op, reads only what the shapes of the results follow from.
"""

import torch

from vllm.model_executor.kernels.xpu_dsv4.mhc.mhc import (
    mhc_fused_post_pre,
    mhc_post,
    mhc_pre,
)
from vllm.utils.torch_utils import direct_register_custom_op


def _mhc_pre_fake(
    residual: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *outer, hc_mult, hidden_size = residual.shape
    return (
        residual.new_empty((*outer, hc_mult, 1), dtype=torch.float32),
        residual.new_empty((*outer, hc_mult, hc_mult), dtype=torch.float32),
        residual.new_empty((*outer, hidden_size)),
    )


def _mhc_post_fake(
    x: torch.Tensor, residual: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _mhc_fused_post_pre_fake(
    x: torch.Tensor, residual: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mixed = _mhc_post_fake(x, residual)
    return mixed, *_mhc_pre_fake(mixed)


direct_register_custom_op(
    op_name="mhc_pre_xpu", op_func=mhc_pre, fake_impl=_mhc_pre_fake
)
direct_register_custom_op(
    op_name="mhc_post_xpu", op_func=mhc_post, fake_impl=_mhc_post_fake
)
direct_register_custom_op(
    op_name="mhc_fused_post_pre_xpu",
    op_func=mhc_fused_post_pre,
    fake_impl=_mhc_fused_post_pre_fake,
)
