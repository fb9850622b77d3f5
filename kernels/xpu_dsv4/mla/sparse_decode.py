# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA decode over FP8 pages: a fused kernel, and one that merges key splits."""

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
from .._launch import cdiv, has_aligned_rows, launch_options
from .._pages import HEAD_DIM, NOPE_DIM, ROPE_DIM, check_pages
from .._softmax import LOG2E, check_sink
from ._decode_config import decode_config, sparse_decode_workspace_size
from ._decode_kernel import _decode_kernel
from ._merge import PARTIAL_WIDTH, merge_splits
from ._output import (
    Fp8Output,
    check_output,
    heads_per_group,
    output_arguments,
    tensors_of,
)

__all__ = ["Fp8Output", "sparse_decode_workspace_size", "xpu_sparse_decode_fp8"]

MOST_HEADS = 128


def _check_lengths(name: str, lens: torch.Tensor, num_tokens: int) -> None:
    check_dtype(name, lens, torch.int32, torch.int64)
    if lens.numel() != num_tokens or (lens.dim() and lens.shape[0] != num_tokens):
        fail(f"{name}.shape", list(lens.shape), f"[{num_tokens}]")
    if num_tokens > 1 and lens.stride(0) != 1:
        fail(f"{name}.stride()", tuple(lens.stride()), "(1,)")


def xpu_sparse_decode_fp8(
    q: torch.Tensor,
    kv_cache: torch.Tensor | None,
    swa_kv_cache: torch.Tensor,
    swa_only: bool,
    topk_indices: torch.Tensor | None,
    topk_lens: torch.Tensor | None,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    out: torch.Tensor | Fp8Output,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attention of each token over its selected keys, read straight from FP8 pages.

    A token's keys are the first `topk_lens` entries of `topk_indices`, in `kv_cache`,
    and the first `swa_lens` entries of `swa_indices`, in `swa_kv_cache`. Entries
    outside `[0, slots)` are skipped, and nothing is read for them. Each key is its own
    value: out = sum(exp(s) * k) / (sum(exp(s)) + exp(sink)), s = softmax_scale * q.k. A
    token without keys gives 0. At most two launches; the host never waits.

    Args:
        q (torch.Tensor):
            Queries of shape `[num_tokens, num_heads, 512]`, bf16, 1 to 128 heads.
        kv_cache (torch.Tensor | None):
            Pages of compressed keys, `[num_blocks, block_size, (1,) 584]` uint8. The
            block stride may be padded to any multiple of 8 bytes. None if `swa_only`.
        swa_kv_cache (torch.Tensor):
            Pages of the sliding window's keys, as `kv_cache`.
        swa_only (bool):
            Ignore `kv_cache`, `topk_indices` and `topk_lens`.
        topk_indices (torch.Tensor | None):
            Slots in `kv_cache`, of shape `[num_tokens, (1,) topk]`, int32 or int64.
        topk_lens (torch.Tensor | None):
            Entries of `topk_indices` that count, of shape `[num_tokens]`, int32 or
            int64; clamped to the width.
        swa_indices (torch.Tensor):
            Slots in `swa_kv_cache`, of shape `[num_tokens, (1,) window]`, int32 or
            int64 as `topk_indices`.
        swa_lens (torch.Tensor):
            Entries of `swa_indices` that count, as `topk_lens`.
        attn_sink (torch.Tensor | None):
            Sinks of shape `[num_heads or more]`, fp32 or bf16, in natural-log units.
            -inf or None is no sink.
        softmax_scale (float):
            Factor of q.k, usually 512 ** -0.5.
        head_dim (int):
            Dims of a head, 512.
        nope_head_dim (int):
            Dims that carry no position, 448.
        rope_head_dim (int):
            Dims of the rotary part, 64.
        out (torch.Tensor | Fp8Output):
            Attention of shape `[num_tokens, num_heads, 512]`, bf16, written in place,
            or the operands of the product behind it.
        workspace (torch.Tensor | None):
            Contiguous fp32 buffer of `sparse_decode_workspace_size` elements for the
            partials of the key splits. None allocates.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_once(
        _check,
        q,
        kv_cache,
        swa_kv_cache,
        swa_only,
        topk_indices,
        topk_lens,
        swa_indices,
        swa_lens,
        attn_sink,
        head_dim,
        nope_head_dim,
        rope_head_dim,
        workspace,
        *tensors_of(out),
    )
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    if swa_only:
        topk_width = 0
        kv_cache, topk_indices, topk_lens = swa_kv_cache, swa_indices, swa_lens
    else:
        assert kv_cache is not None and topk_indices is not None
        topk_width = topk_indices.shape[-1]
    swa_width = swa_indices.shape[-1]
    config = decode_config(
        num_tokens,
        num_heads,
        topk_width + swa_width,
        has_aligned_rows(q),
    )
    partial = _partials(workspace, q, config.splits)
    # With splits the merge writes `out`, and the kernel nothing but partials.
    direct = out if config.splits == 1 else q
    output = output_arguments(direct)
    head_blocks = cdiv(num_heads, config.block_h)
    _decode_kernel[(num_tokens * config.splits * head_blocks,)](
        q,
        kv_cache,
        swa_kv_cache,
        topk_indices,
        topk_lens,
        swa_indices,
        swa_lens,
        attn_sink,
        output.pointer,
        partial,
        num_heads,
        topk_width,
        swa_width,
        config.splits,
        _num_slots(kv_cache),
        _num_slots(swa_kv_cache),
        q.stride(0),
        q.stride(1),
        *output.strides,
        kv_cache.stride(0),
        swa_kv_cache.stride(0),
        topk_indices.stride(0),
        swa_indices.stride(0),
        softmax_scale * LOG2E,
        *output.operands,
        KV_BLOCK_SIZE=kv_cache.shape[1],
        SWA_BLOCK_SIZE=swa_kv_cache.shape[1],
        HAS_TOPK=not swa_only,
        HAS_SINK=attn_sink is not None,
        SPLIT=config.splits > 1,
        HEADS_PER_GROUP=heads_per_group(direct),
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        Q_BLOCKS=config.q_blocks,
        **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
    )
    if config.splits > 1:
        merge_splits(partial, attn_sink, out, num_tokens, num_heads, config.splits)


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor | None,
    swa_kv_cache: torch.Tensor,
    swa_only: bool,
    topk_indices: torch.Tensor | None,
    topk_lens: torch.Tensor | None,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    attn_sink: torch.Tensor | None,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `xpu_sparse_decode_fp8` fit together."""
    _check_head_dims(head_dim, nope_head_dim, rope_head_dim)
    num_tokens, num_heads = _check_queries(q)
    check_output(num_tokens, num_heads, out, scales, positions, cos_sin_cache)
    check_pages("swa_kv_cache", swa_kv_cache)
    check_index_rows("swa_indices", swa_indices, num_tokens)
    _check_lengths("swa_lens", swa_lens, num_tokens)
    if not swa_only:
        if kv_cache is None:
            fail("kv_cache", None, "pages unless swa_only")
        if topk_indices is None:
            fail("topk_indices", None, "a tensor unless swa_only")
        if topk_lens is None:
            fail("topk_lens", None, "a tensor unless swa_only")
        check_pages("kv_cache", kv_cache)
        check_index_rows("topk_indices", topk_indices, num_tokens)
        check_dtype("topk_indices", topk_indices, swa_indices.dtype)
        _check_lengths("topk_lens", topk_lens, num_tokens)
    check_sink(attn_sink, num_heads)
    check_same_device(
        q=q,
        kv_cache=None if swa_only else kv_cache,
        swa_kv_cache=swa_kv_cache,
        topk_indices=None if swa_only else topk_indices,
        topk_lens=None if swa_only else topk_lens,
        swa_indices=swa_indices,
        swa_lens=swa_lens,
        attn_sink=attn_sink,
        out=out,
        scales=scales,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        workspace=workspace,
    )
    if workspace is not None:
        check_dtype("workspace", workspace, torch.float32)


def _check_head_dims(head_dim: int, nope_head_dim: int, rope_head_dim: int) -> None:
    for name, value, want in (
        ("head_dim", head_dim, HEAD_DIM),
        ("nope_head_dim", nope_head_dim, NOPE_DIM),
        ("rope_head_dim", rope_head_dim, ROPE_DIM),
    ):
        if value != want:
            fail(name, value, str(want))


def _check_queries(q: torch.Tensor) -> tuple[int, int]:
    """Check `q`; return the number of tokens and of heads."""
    check_dtype("q", q, torch.bfloat16)
    check_shape("q", q, None, None, HEAD_DIM)
    check_inner_contiguous("q", q)
    num_tokens, num_heads, _ = q.shape
    if not 1 <= num_heads <= MOST_HEADS:
        fail("q.shape[1]", num_heads, f"1 to {MOST_HEADS} heads")
    return num_tokens, num_heads


def _num_slots(cache: torch.Tensor) -> int:
    """Slots of a cache, as far as int32 can number them."""
    return min(cache.shape[0] * cache.shape[1], 2**31 - 1)


def _partials(
    workspace: torch.Tensor | None, q: torch.Tensor, splits: int
) -> torch.Tensor:
    """The buffer of the partials; without a split any tensor does, so `q`."""
    if splits == 1:
        return q
    size = q.shape[0] * q.shape[1] * splits * PARTIAL_WIDTH
    if workspace is None:
        return torch.empty(size, dtype=torch.float32, device=q.device)
    if workspace.numel() < size or not workspace.is_contiguous():
        fail(
            "workspace.shape",
            list(workspace.shape),
            f"a contiguous tensor of at least {size} elements",
        )
    return workspace
