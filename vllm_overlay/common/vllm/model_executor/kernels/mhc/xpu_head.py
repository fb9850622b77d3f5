# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The hyper-connections' head on XPU, as a custom op."""

import torch

from vllm.model_executor.kernels.xpu_dsv4.mhc.mhc_head import hc_head
from vllm.utils.torch_utils import direct_register_custom_op


def _hc_head_fake(
    hidden_states: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    *outer, _, hidden_size = hidden_states.shape
    return hidden_states.new_empty((*outer, hidden_size))


direct_register_custom_op(
    op_name="hc_head_xpu", op_func=hc_head, fake_impl=_hc_head_fake
)
