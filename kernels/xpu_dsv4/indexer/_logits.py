# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The indexer's scores, for FP8 and for MXFP4 operands: checks, result and launch.

The public ops of `mqa_logits` and `mqa_logits_mxfp4` name the arguments and describe
them. The scales of MXFP4 queries are a tensor beside the queries, those of FP8 queries
are in the weights: `q_scales` is None for FP8.
"""

from typing import NamedTuple

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from .._fp4 import MXFP4_BLOCK, SCALES_A_WORD
from .._launch import cdiv, launch_options, next_power_of_2
from ._logits_kernels import mqa_logits_kernel, paged_mqa_logits_kernel

MOST_HEADS = 128
SCALE_BYTES = 4
"""Scale bytes of a key in a page: an fp32, or four UE8M0 bytes."""
_AXIS_LIMIT = 65535
"""Programs along the second and third axis of a grid."""


class _Format(NamedTuple):
    """How queries and keys are stored.

    Attributes:
        dtypes: of queries and of gathered keys.
        scale_dtype: of the scales of gathered keys.
        page_alignment: bytes that a page's start is a multiple of.

    """

    dtypes: tuple[torch.dtype, ...]
    scale_dtype: torch.dtype
    page_alignment: int


class LogitsConfig(NamedTuple):
    """How the scores are divided into tiles.

    Attributes:
        block_m: rows per tile, where keys are gathered.
        block_n: keys per tile, of which a tile over pages may write all but one behind
            a row.
        num_warps: warps per program; on XPU, sub-groups of 16 lanes.
        num_stages: depth of software pipelining.
        grf: registers per hardware thread on XPU, 128 or 256.

    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    grf: int


GATHERED = LogitsConfig(16, 256, num_warps=16, num_stages=1, grf=256)
PAGED = LogitsConfig(1, 128, num_warps=8, num_stages=1, grf=256)
PAGED_WORDS = LogitsConfig(1, 256, num_warps=8, num_stages=1, grf=256)
"""For Intel, of MXFP4."""
_MOST_KEYS = 512


def tiles_a_program(tokens: int, block_n: int = PAGED.block_n) -> int:
    """Tiles of paged keys over which a program keeps a token's queries.

    With more for a few tokens there would be too few programs for a device.
    """
    return max(1, min(tokens * 32, _MOST_KEYS) // block_n)


_FP8 = _Format((torch.float8_e4m3fn,), torch.float32, 4)
_MXFP4 = _Format((torch.uint8, torch.int8), torch.int32, 1)


def mqa_logits(
    q: torch.Tensor,
    q_scales: torch.Tensor | None,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of prefill rows over gathered keys, `[M, N]` fp32.

    See `fp8_mqa_logits` and, with `q_scales`, `mxfp4_mqa_logits`.
    """
    form = _FP8 if q_scales is None else _MXFP4
    check_shape("q", q, None, None, None)
    _check_queries("q", q, q_scales, weights)
    rows, heads, width = q.shape
    check_dtype("kv", kv, *form.dtypes)
    check_shape("kv", kv, None, width)
    check_inner_contiguous("kv", kv)
    num_keys = kv.shape[0]
    check_dtype("kv_scales", kv_scales, form.scale_dtype)
    check_shape("kv_scales", kv_scales, num_keys)
    check_inner_contiguous("kv_scales", kv_scales)
    bounds = {"cu_seqlen_ks": cu_seqlen_ks, "cu_seqlen_ke": cu_seqlen_ke}
    for name, bound in bounds.items():
        check_dtype(name, bound, torch.int32)
        check_shape(name, bound, rows)
        check_inner_contiguous(name, bound)
    check_same_device(
        q=q,
        q_scales=q_scales,
        kv=kv,
        kv_scales=kv_scales,
        weights=weights,
        **bounds,
        out=out,
    )
    logits = _output(out, rows, num_keys, q.device)
    if rows and num_keys:
        config = GATHERED
        row_blocks = cdiv(rows, config.block_m)
        mqa_logits_kernel[_grid(row_blocks, num_keys, config.block_n)](
            q.view(torch.uint8),
            q_scales,
            kv.view(torch.uint8),
            kv_scales,
            weights,
            cu_seqlen_ks,
            cu_seqlen_ke,
            logits,
            rows,
            num_keys,
            heads,
            q.stride(0),
            q.stride(1),
            0 if q_scales is None else q_scales.stride(0),
            kv.stride(0),
            weights.stride(0),
            logits.stride(0),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_H=_padded(heads),
            DIM=_dim(width, q_scales),
            FP4=q_scales is not None,
            LANES_ARE_KEYS=_lanes_are_keys(q, q_scales),
            **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
        )
    return logits


def paged_mqa_logits(
    names: tuple[str, str],
    q: torch.Tensor,
    q_scales: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of decode tokens over paged keys, `[B * next_n, max_model_len]` fp32.

    See `fp8_paged_mqa_logits` and, with `q_scales`, `mxfp4_paged_mqa_logits`; `names`
    are those of `q` and `kv_cache` there.
    """
    q_name, cache_name = names
    form = _FP8 if q_scales is None else _MXFP4
    check_shape(q_name, q, None, None, None, None)
    _check_queries(q_name, q, q_scales, weights)
    requests, next_n, heads, width = q.shape
    pages = _key_pages(cache_name, kv_cache, width + SCALE_BYTES, form.page_alignment)
    row_lens = _check_context(
        context_lens, block_tables, requests, next_n, max_model_len
    )
    check_same_device(
        **{q_name: q, "q_scales": q_scales, cache_name: pages},
        weights=weights,
        context_lens=context_lens,
        block_tables=block_tables,
        out=out,
    )
    logits = _output(out, requests * next_n, max_model_len, q.device)
    if requests and next_n and max_model_len:
        rows = requests * next_n
        config, shared = _paged_config(q, pages, q_scales is not None)
        tiles = tiles_a_program(rows, config.block_n)
        keys = tiles * config.block_n
        warps = config.num_warps if shared else 0
        paged_mqa_logits_kernel[_grid(rows, max_model_len, keys)](
            q.view(torch.uint8),
            q_scales,
            pages,
            weights,
            context_lens,
            block_tables,
            logits,
            pages.shape[0],
            heads,
            max_model_len,
            block_tables.shape[1],
            pages.stride(0),
            q.stride(0),
            q.stride(1),
            q.stride(2),
            0 if q_scales is None else q_scales.stride(0),
            0 if q_scales is None else q_scales.stride(1),
            weights.stride(0),
            context_lens.stride(0),
            block_tables.stride(0),
            logits.stride(0),
            tiles,
            NEXT_N=next_n,
            BLOCK_SIZE=pages.shape[1],
            BLOCK_N=config.block_n,
            BLOCK_H=_padded(heads, groups=2 if warps and q_scales is None else 1),
            DIM=_dim(width, q_scales),
            ROW_LENS=row_lens,
            FP4=q_scales is not None,
            WARPS=warps,
            **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
        )
    return logits


def _grid(first: int, num_keys: int, block_n: int) -> tuple[int, int, int]:
    """`first` programs for each tile of keys; 65,536 tiles and more take two axes."""
    tiles = cdiv(num_keys, block_n)
    return first, min(tiles, _AXIS_LIMIT), cdiv(tiles, _AXIS_LIMIT)


def _check_queries(
    name: str, q: torch.Tensor, q_scales: torch.Tensor | None, weights: torch.Tensor
) -> None:
    """Raise unless `q` is `[..., H, D]` and `weights` fp32 `[rows of q, H]`.

    MXFP4 queries are `[..., H, D / 2]` with `q_scales`, one int32 word per head.
    """
    width = q.shape[-1]
    if q_scales is None:
        check_dtype(name, q, *_FP8.dtypes)
        if width < 32 or width & (width - 1):
            fail(f"{name}.shape[-1]", width, "a power of two of at least 32")
    else:
        check_dtype(name, q, *_MXFP4.dtypes)
        packed = MXFP4_BLOCK * SCALES_A_WORD // 2
        if width != packed:
            fail(f"{name}.shape[-1]", width, f"{packed} packed bytes")
    check_inner_contiguous(name, q)
    heads = q.shape[-2]
    if not 1 <= heads <= MOST_HEADS:
        fail(f"{name}.shape[-2]", heads, f"1 to {MOST_HEADS} heads")
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, q.shape[:-2].numel(), heads)
    check_inner_contiguous("weights", weights)
    if q_scales is not None:
        check_dtype("q_scales", q_scales, torch.int32)
        check_shape("q_scales", q_scales, *q.shape[:-1])
        check_inner_contiguous("q_scales", q_scales)


def _key_pages(
    name: str, cache: torch.Tensor, width: int, alignment: int
) -> torch.Tensor:
    """`[num_blocks, block_size, width]` view of uint8 pages without gaps inside.

    Pages start at multiples of `alignment` bytes. An axis of one head is dropped.
    """
    check_dtype(name, cache, torch.uint8)
    pages = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    check_shape(name, pages, None, None, width)
    check_inner_contiguous(name, pages)
    block_size = pages.shape[1]
    if block_size < 1 or (block_size > 1 and pages.stride(1) != width):
        fail(f"{name}.stride()", cache.stride(), "pages without gaps inside")
    if pages.stride(0) % alignment or pages.storage_offset() % alignment:
        want = f"{alignment}-byte words in every page"
        fail(f"{name}.stride(0)", pages.stride(0), want)
    return pages


def _check_context(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    requests: int,
    next_n: int,
    max_model_len: int,
) -> bool:
    """Check lengths and block tables; return whether each row has its own length."""
    check_dtype("context_lens", context_lens, torch.int32)
    row_lens = context_lens.dim() == 2 and context_lens.shape[1] == next_n
    if context_lens.dim() > 2 or not (row_lens or context_lens.numel() == requests):
        fail("context_lens.shape", list(context_lens.shape), f"[{requests}, {next_n}]")
    if row_lens:
        check_inner_contiguous("context_lens", context_lens)
    check_shape("block_tables", block_tables, requests, None)
    check_dtype("block_tables", block_tables, torch.int32)
    check_inner_contiguous("block_tables", block_tables)
    if max_model_len < 0:
        fail("max_model_len", max_model_len, "at least 0")
    return row_lens


def _output(
    out: torch.Tensor | None, rows: int, width: int, device: torch.device
) -> torch.Tensor:
    """`out` after its check, or a new fp32 tensor `[rows, width]`."""
    if out is None:
        return torch.empty((rows, width), dtype=torch.float32, device=device)
    check_dtype("out", out, torch.float32)
    check_shape("out", out, rows, width)
    check_inner_contiguous("out", out)
    return out


def _dim(width: int, q_scales: torch.Tensor | None) -> int:
    """Values of a head that is `width` bytes long."""
    return width if q_scales is None else 2 * width


def _padded(heads: int, groups: int = 1) -> int:
    """Columns of the matrix products that hold `heads`, in `groups` products."""
    return max(16 * groups, next_power_of_2(heads))


def _paged_config(
    q: torch.Tensor, pages: torch.Tensor, fp4: bool
) -> tuple[LogitsConfig, bool]:
    """The tiles of a form, and whether it is the one for Intel: there a sub-group's
    keys of a tile lie in one page, and MXFP4 is read in aligned words.

    Without a page there is none to read for a key that does not exist.
    """
    if pages.device.type == "cuda" or not pages.shape[0]:
        return PAGED, False
    config = PAGED_WORDS if fp4 else PAGED
    in_a_page = pages.shape[1] % (config.block_n // config.num_warps) == 0
    if not in_a_page or (fp4 and not (_in_words(q) and _in_words(pages))):
        return PAGED, False
    return config, True


def _in_words(x: torch.Tensor) -> bool:
    """Whether every row of bytes begins at a multiple of four bytes."""
    starts = (x.storage_offset(), *x.stride()[:-1])
    return not any(start % 4 for start in starts)


def _lanes_are_keys(q: torch.Tensor, q_scales: torch.Tensor | None) -> bool:
    """Whether a lane reads one byte of an MXFP4 key at a time: the form for Intel."""
    return q_scales is not None and q.device.type != "cuda"
