# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The hyper-connections' head: one hidden state from the four residual streams.

The releases before v0.23.0 lack an operator for it. `mhc` describes the streams and
their gates.
"""

import torch

from .._checks import check_same_device
from .._launch import cdiv, launch_options, next_power_of_2
from .._triton import tl, triton
from ._mhc_checks import check_gates, check_streams
from ._mhc_kernels import HC_MULT, inverse_rms, store_input_tile
from ._mhc_launch import project


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def head_kernel(
    residual_ptr,
    partial_ptr,
    scale_ptr,
    base_ptr,
    out_ptr,
    num_tokens,
    hidden,
    num_splits,
    residual_token_stride,
    residual_stream_stride,
    rms_eps,
    pre_eps,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of hidden dims of one token."""
    token = tl.program_id(0).to(tl.int64)
    split_offs = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    split_mask = split_offs < num_splits  # [BLOCK_S]
    # [BLOCK_S]
    row_ptrs = partial_ptr + (split_offs.to(tl.int64) * num_tokens + token) * COLUMNS
    store_input_tile(
        residual_ptr,
        row_ptrs,
        split_mask,
        scale_ptr,
        base_ptr,
        out_ptr,
        token,
        tl.program_id(1),
        hidden,
        residual_token_stride,
        residual_stream_stride,
        inverse_rms(row_ptrs, split_mask, hidden, rms_eps, GATES),
        pre_eps,
        COLUMNS,
        BLOCK_D,
    )


def hc_head(
    hidden_states: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Sum up the residual streams after the last layer. Two launches.

    With m = hc_fn x / rms(x) over the flattened streams x:
    out = sum_i (sigmoid(scale m_i + base_i) + hc_eps) stream_i.

    Args:
        hidden_states (torch.Tensor):
            Streams of shape `[..., 4, hidden]`, bf16.
        hc_fn (torch.Tensor):
            Projection of shape `[4, 4 * hidden]`, fp32.
        hc_scale (torch.Tensor):
            Scale of the gates, of shape `[1]`, fp32.
        hc_base (torch.Tensor):
            Biases of the gates, of shape `[4]`, fp32.
        rms_norm_eps (float):
            Added to the streams' mean square.
        hc_eps (float):
            Added to the gates.

    Returns:
        Hidden states of shape `[..., hidden]`, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    streams = check_streams("hidden_states", hidden_states)
    check_gates(hc_fn, hc_scale, hc_base, HC_MULT, 1, HC_MULT * streams.shape[2])
    check_same_device(
        hidden_states=hidden_states, hc_fn=hc_fn, hc_scale=hc_scale, hc_base=hc_base
    )
    partial, _ = project(streams, hc_fn)
    splits, tokens, columns = partial.shape
    hidden = streams.shape[2]
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=streams.device)
    if tokens:
        block_d = 512 if tokens <= 64 else 1024
        head_kernel[(tokens, cdiv(hidden, block_d))](
            streams,
            partial,
            hc_scale,
            hc_base,
            out,
            tokens,
            hidden,
            splits,
            streams.stride(0),
            streams.stride(1),
            rms_norm_eps,
            hc_eps,
            GATES=HC_MULT,
            COLUMNS=columns,
            BLOCK_S=next_power_of_2(splits),
            BLOCK_D=block_d,
            **launch_options(streams.device, num_warps=4),
        )
    return out.view(*hidden_states.shape[:-2], hidden)
