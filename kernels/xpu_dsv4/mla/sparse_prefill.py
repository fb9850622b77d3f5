# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA prefill over gathered bf16 keys, in one launch."""

import torch

from .._checks import (
    check_dtype,
    check_index_rows,
    check_inner_contiguous,
    check_once,
    check_same_device,
    check_shape,
    fail,
)
from .._launch import cdiv, has_aligned_rows, has_packed_rows, launch_options
from .._pages import HEAD_DIM
from .._softmax import LOG2E, check_sink
from ._output import (
    Fp8Output,
    check_output,
    heads_per_group,
    output_arguments,
    tensors_of,
)
from ._prefill_config import prefill_config
from ._prefill_dim_lanes import _dim_lanes_prefill_kernel
from ._prefill_dim_lanes_16 import _dim_lanes_16_prefill_kernel
from ._prefill_kernel import _prefill_kernel


def xpu_sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | Fp8Output | None = None,
) -> torch.Tensor | Fp8Output:
    """Attention of each query over the keys that its row of `indices` names.

    With s = sm_scale * q.k: out = sum(exp(s) * k) / (sum(exp(s)) + exp(sink)). A query
    without valid keys gives 0. One launch.

    Args:
        q (torch.Tensor):
            Queries of shape `[num_tokens, num_heads, 512]`, bf16.
        kv (torch.Tensor):
            Keys, which are the values as well, of shape `[num_rows, 1, 512]`, bf16.
        indices (torch.Tensor):
            Rows of `kv`, of shape `[num_tokens, (1,) topk]`, int32 or int64. Entries
            outside `[0, num_rows)` are skipped.
        sm_scale (float):
            Factor of q.k.
        attn_sink (torch.Tensor | None):
            Sinks of shape `[num_heads or more]`, fp32 or bf16, in natural-log units.
        topk_length (torch.Tensor | None):
            Entries of each row of `indices` that count, the first ones, of shape
            `[num_tokens]`, int32 or int64; clamped to the width. None counts all.
        out (torch.Tensor | Fp8Output | None):
            Where to write the attention, of shape `[num_tokens, num_heads, 512]`, bf16,
            or the operands of the product behind it. None allocates bf16.

    Returns:
        The attention, of the shape of `q`, bf16: `out` where it is given.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_once(_check, q, kv, indices, attn_sink, topk_length, *tensors_of(out))
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out

    config = prefill_config(num_heads, has_aligned_rows(q), has_packed_rows(kv))
    output = output_arguments(out)
    head_blocks = cdiv(num_heads, config.block_h)
    form: dict[str, bool] = {}
    if config.dim_lanes and config.block_h == 8:
        kernel = _dim_lanes_prefill_kernel
    elif config.dim_lanes:
        kernel = _dim_lanes_16_prefill_kernel
    else:
        kernel, form = _prefill_kernel, {"Q_BLOCKS": config.q_blocks}
    kernel[(num_tokens * head_blocks,)](
        q,
        kv,
        indices,
        topk_length,
        attn_sink,
        output.pointer,
        num_heads,
        kv.shape[0],
        indices.shape[-1],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        indices.stride(0),
        *output.strides,
        sm_scale * LOG2E,
        *output.operands,
        HAS_LENS=topk_length is not None,
        HAS_SINK=attn_sink is not None,
        HEADS_PER_GROUP=heads_per_group(out),
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        **form,
        **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
    )
    return out


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    scales: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `xpu_sparse_prefill` fit together."""
    check_dtype("q", q, torch.bfloat16)
    check_shape("q", q, None, None, HEAD_DIM)
    num_tokens, num_heads, _ = q.shape
    if num_heads < 1:
        fail("q.shape[1]", num_heads, "at least one head")
    check_inner_contiguous("q", q)
    check_dtype("kv", kv, torch.bfloat16)
    check_shape("kv", kv, None, 1, HEAD_DIM)
    check_inner_contiguous("kv", kv)
    check_index_rows("indices", indices, num_tokens)
    check_sink(attn_sink, num_heads)
    if topk_length is not None:
        check_dtype("topk_length", topk_length, torch.int32, torch.int64)
        check_shape("topk_length", topk_length, num_tokens)
        check_inner_contiguous("topk_length", topk_length)
    if out is not None:
        check_output(num_tokens, num_heads, out, scales, positions, cos_sin_cache)
    check_same_device(
        q=q,
        kv=kv,
        indices=indices,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
        scales=scales,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
    )
