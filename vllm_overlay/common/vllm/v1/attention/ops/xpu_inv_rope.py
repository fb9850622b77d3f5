# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inverse RoPE of DeepSeek-V4 on XPU, as a custom op that torch.compile does not enter.

It gives the operand of a product for each group of heads, contiguous with the groups
outermost: no transposition or copy follows.
"""

import torch

from vllm.model_executor.kernels.xpu_dsv4.mla.inv_rope import inv_rope_bf16
from vllm.utils.torch_utils import direct_register_custom_op


def _xpu_inv_rope_bf16(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
) -> torch.Tensor:
    """Rows of shape `[n_groups, T, heads / n_groups * D]`, bf16, from `o` `[T, heads,
    D]`."""
    rope_dim = cos_sin_cache.shape[-1]
    rows = inv_rope_bf16(
        o,
        positions,
        cos_sin_cache,
        n_groups,
        o.shape[1] // n_groups,
        o.shape[2] - rope_dim,
        rope_dim,
    )
    return rows.transpose(0, 1)


def _xpu_inv_rope_bf16_fake(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = o.shape
    return o.new_empty((n_groups, num_tokens, num_heads // n_groups * head_dim))


direct_register_custom_op(
    op_name="xpu_inv_rope_bf16",
    op_func=_xpu_inv_rope_bf16,
    fake_impl=_xpu_inv_rope_bf16_fake,
)
