# SPDX-License-Identifier: Apache-2.0
"""Record upstream's own kernels of the pinned releases, to be reported beside ours.

The kernel files come from the pinned source archives; stand-ins replace the rest of
vLLM. The report shows what a deployment without this stack compiles, and does not judge
it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from lab.aot.calls.record import LaunchRecord, record_cases
from lab.aot.calls.shapes import (
    CONTEXT,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    PAGE_BYTES,
    ROPE_DIM,
    WINDOW,
    Case,
    f32,
    i32,
    i64,
    meta,
    pages,
    u8,
)
from lab.benchmarks.files import (
    ATTENTION,
    DECODE,
    FILES,
    INSERT,
    V41_CANDIDATES,
    V41_COMPRESS,
    V41_INDEXER_KEYS,
)
from lab.benchmarks.prepare import upstream
from lab.benchmarks.upstream import importing
from stack.core.cache import Cache, atomic_dir

RELEASES = ("0.22.1", "0.33.0")
Load = Callable[[str], ModuleType]


@triton.jit  # type: ignore[untyped-decorator]
def softmax(x, dim: tl.constexpr = 0):  # type: ignore[no-untyped-def]
    """`tl.softmax` with a named axis, which triton-xpu 3.3 does not have."""
    tl.static_assert(dim == 0)
    weight = tl.exp(x - tl.max(x, 0))
    return weight / tl.sum(weight, 0)


def record_releases(cache: Cache) -> list[LaunchRecord]:
    """Record the launches of upstream's kernels in every release."""
    records = []
    for release in RELEASES:
        with importing(files(cache, release)) as load, newer_softmax():
            records += record_cases(f"v{release}", cases(release, load))
    return records


@contextmanager
def newer_softmax() -> Iterator[None]:
    """Replace `tl.softmax` by `softmax` while kernels are recorded and compiled."""
    original = tl.softmax
    tl.softmax = softmax
    try:
        yield
    finally:
        tl.softmax = original


def files(cache: Cache, release: str) -> Path:
    """A release's kernel files in the cache."""
    target = cache.root / "upstream-kernels" / f"{release}-{len(FILES[release])}"
    if not target.is_dir():
        with atomic_dir(target) as folder:
            upstream(folder, release)
    return target


def cases(release: str, load: Load) -> Iterator[Case]:
    """What XPU runs of a release.

    In v0.33.0 XPU takes the indexer's queries from vllm-xpu-kernels.
    """

    def op(name: str) -> ModuleType:
        paths = FILES[release]
        return load(next(path for path in paths if path.endswith(f"/{name}.py")))

    if ATTENTION in FILES[release]:
        yield from attention(load)
    yield from common(op)
    if release != "0.33.0":
        yield from queries(op)
    yield from compressor(op)
    yield from norms(op)
    if ATTENTION in FILES[release]:
        yield from mixed(op)
        yield from draft_norms(op)
    if V41_COMPRESS in FILES[release]:
        yield from v41_compressor(load)
        yield from v41_candidates(load)


def attention(load: Load) -> Iterator[Case]:
    """Sparse attention, its gather, and the insert."""
    for label, heads, keys in (("Flash TP1", 64, 640), ("Flash TP8", 8, 640)):
        yield Case(
            "prefill",
            label,
            partial(
                load(ATTENTION).triton_bf16_mla_sparse_interface,
                meta(2048, heads, HEAD_DIM),
                meta(65536, 1, HEAD_DIM),
                meta(2048, 1, keys, dtype=i32),
                HEAD_DIM**-0.5,
                block_dpe=0,
            ),
        )
    yield Case(
        "gather",
        "slots",
        lambda: load(DECODE).dequant_gather_slots(
            meta(10240, HEAD_DIM), pages(64), meta(10240, dtype=i32), 64
        ),
    )
    yield Case(
        "insert",
        "Flash TP1",
        lambda: load(INSERT).xpu_qnorm_rope_kv_fp8_insert(
            meta(16, 64, HEAD_DIM),
            meta(16, HEAD_DIM),
            meta(4096, PAGE_BYTES[64], dtype=u8),
            meta(16, dtype=i64),
            meta(16, dtype=i64),
            meta(65536, ROPE_DIM, dtype=f32),
            1e-6,
            64,
        ),
    )


def common(op: Load) -> Iterator[Case]:
    """Insert, gather by request, indices, inverse RoPE."""
    table = meta(16, 4096, dtype=i32)
    rows = meta(16, dtype=i32)
    yield Case(
        "insert",
        "keys alone",
        lambda: op("cache_utils").quantize_and_insert_k_cache(
            meta(16, HEAD_DIM), pages(64), meta(16, dtype=i64), 64
        ),
    )
    yield Case(
        "gather",
        "by request",
        lambda: op("cache_utils").dequantize_and_gather_k_cache(
            meta(16, 4096, HEAD_DIM), pages(64), rows, rows, table, 64, 0
        ),
    )
    tokens, topk = 2048, 512
    yield Case(
        "topk",
        "global",
        lambda: op("cache_utils").compute_global_topk_indices_and_lens(
            meta(tokens, topk, dtype=i32),
            meta(tokens, dtype=i32),
            table,
            64,
            meta(tokens, dtype=u8),
        ),
    )
    yield Case(
        "topk",
        "combine",
        lambda: op("cache_utils").combine_topk_swa_indices(
            meta(tokens, topk, dtype=i32),
            meta(17, dtype=i32),
            rows,
            rows,
            WINDOW,
            4,
            topk,
            8192,
            4096,
        ),
    )
    yield Case(
        "inv_rope",
        "FP8",
        lambda: op("fused_inv_rope_fp8_quant").fused_inv_rope_fp8_quant(
            meta(16, 64, HEAD_DIM),
            meta(16, dtype=i64),
            meta(65536, ROPE_DIM, dtype=f32),
            8,
            8,
        ),
    )


def mixed(op: Load) -> Iterator[Case]:
    """The indices of a batch with decode and prefill, where XPU has a folder."""
    table = meta(16, 4096, dtype=i32)
    rows = meta(16, dtype=i32)
    tokens, topk = 2048, 512
    yield Case(
        "topk",
        "mixed",
        lambda: op("cache_utils").build_flashinfer_mixed_sparse_indices(
            meta(16, WINDOW, dtype=i32),
            None,
            None,
            meta(tokens, topk, dtype=i32),
            meta(17, dtype=i32),
            rows,
            meta(tokens + 16, dtype=i32),
            table,
            64,
            table,
            64,
            WINDOW,
            4,
            topk,
        ),
    )


def queries(op: Load) -> Iterator[Case]:
    """The indexer's queries."""
    yield Case(
        "indexer_q",
        "FP8",
        lambda: op("fused_indexer_q").fused_indexer_q_rope_quant(
            meta(16, dtype=i64),
            meta(16, INDEX_HEADS, INDEX_DIM),
            meta(65536, ROPE_DIM, dtype=f32),
            meta(16, INDEX_HEADS),
            INDEX_DIM**-0.5,
            INDEX_HEADS**-0.5,
        ),
    )


def compressor(op: Load) -> Iterator[Case]:
    """Partial states, and compress + norm + RoPE + insert for both caches."""
    for ratio, overlap in ((4, True), (128, False)):
        width = HEAD_DIM * (2 if overlap else 1)
        yield Case(
            "compressor",
            f"partial states, ratio {ratio}",
            partial(
                launcher(op("save_partial_states"), "save_partial_states"),
                meta(16, width, dtype=f32),
                meta(16, width, dtype=f32),
                meta(ratio, width, dtype=f32),
                meta(16, dtype=i64),
                meta(4096, ratio, 2 * width, dtype=f32),
                meta(16, dtype=i64),
                ratio,
                width,
                ratio,
            ),
        )
        yield Case(
            "compressor",
            f"compress and insert, ratio {ratio}",
            partial(
                compress, op, HEAD_DIM, width, ratio, overlap, pages(64), 64, 576, 8
            ),
        )
    yield Case(
        "compressor",
        "compress and insert, indexer",
        lambda: compress(
            op,
            INDEX_DIM,
            2 * INDEX_DIM,
            4,
            True,
            meta(4096, 64, INDEX_DIM + 4, dtype=u8),
            INDEX_DIM,
            INDEX_DIM,
            4,
        ),
    )


def compress(
    op: Load,
    head_dim: int,
    width: int,
    ratio: int,
    overlap: bool,
    cache: Any,
    quant_block: int,
    token_stride: int,
    scale_dim: int,
) -> None:
    """One launch of the compressor for one cache."""
    op("fused_compress_quant_cache").compress_norm_rope_store_triton(
        state_cache=meta(4096, ratio, 2 * width, dtype=f32),
        num_actual=16,
        token_to_req_indices=meta(16, dtype=i32),
        positions=meta(16, dtype=i64),
        slot_mapping=meta(16, dtype=i64),
        block_table=meta(16, CONTEXT // 64, dtype=i32),
        block_size=ratio,
        state_width=width,
        cos_sin_cache=meta(65536, ROPE_DIM, dtype=f32),
        kv_cache=cache,
        k_cache_metadata=SimpleNamespace(slot_mapping=meta(16, dtype=i64)),
        pdl_kwargs={},
        head_dim=head_dim,
        rope_head_dim=ROPE_DIM,
        compress_ratio=ratio,
        overlap=overlap,
        use_fp4_cache=False,
        rms_norm_weight=meta(head_dim),
        rms_norm_eps=1e-6,
        quant_block=quant_block,
        token_stride=token_stride,
        scale_dim=scale_dim,
    )


def v41_compressor(load: Load) -> Iterator[Case]:
    """DeepSeek-V4.1's compressor, insert and indexer keys, at ratios 1 and 2."""
    tokens, slots = meta(16, dtype=i64), meta(16, dtype=i64)
    rotary = meta(65536, ROPE_DIM, dtype=f32)
    compress = load(V41_COMPRESS)
    for ratio in (1, 2):
        yield Case(
            "compressor",
            f"V4.1, save and compress, ratio {ratio}",
            partial(
                compress.fused_save_compress_norm,
                meta(16, HEAD_DIM * ratio, dtype=f32),
                tokens,
                meta(4096, 8, 2 * HEAD_DIM, dtype=f32),
                slots,
                meta(17, dtype=i32),
                meta(16, dtype=i32),
                meta(HEAD_DIM),
                1e-20,
                ratio,
                meta(16, HEAD_DIM),
            ),
        )
        yield Case(
            "compressor",
            f"V4.1, RoPE and insert, ratio {ratio}",
            partial(
                compress.rope_quant_insert,
                *(meta(16, HEAD_DIM), tokens, rotary, pages(64), slots, ratio),
            ),
        )
        yield Case(
            "compressor",
            f"V4.1, indexer keys, ratio {ratio}",
            partial(
                load(V41_INDEXER_KEYS).indexer_k_norm_rope_store,
                *(meta(16, INDEX_DIM), tokens, rotary, meta(INDEX_DIM), 1e-20),
                *(meta(4096, 64, INDEX_DIM + 4, dtype=u8), slots, ratio, False),
            ),
        )


def v41_candidates(load: Load) -> Iterator[Case]:
    """DeepSeek-V4.1's candidate blocks. The wrappers ask for a CUDA tensor, so these
    are their four launches: 16 rows, 2,048 of 131,072 blocks of 8."""
    kernels = load(V41_CANDIDATES)
    rows, width, block, topk = 16, CONTEXT, 8, 2048
    blocks = width // block
    logits, ends = meta(rows, width, dtype=f32), meta(rows, dtype=i32)
    scores, chosen = meta(rows, blocks, dtype=f32), meta(rows, topk, dtype=i32)
    flags = meta(rows, blocks + 1, dtype=u8)
    launches: dict[str, Callable[[], object]] = {
        "scores": lambda: kernels._block_scores_kernel[(rows, 32)](
            *(logits, None, ends, scores, meta(rows, dtype=i32), width, 1, 0, 1),
            *(blocks, width, blocks, block, False, 1),
            TILE=128,
            FULL_WIDTH=True,
        ),
        "store": lambda: kernels._store_candidates_kernel[(rows, topk // 256)](
            *(meta(rows, topk, dtype=f32), meta(rows, topk, dtype=i64), chosen),
            *(topk, 1, topk, topk, 256),
        ),
        "flags": lambda: kernels._candidate_flags_kernel[(rows,)](
            *(chosen, None, flags, topk, 1, 0, width, blocks, block, topk, False, 1),
        ),
        "mask": lambda: kernels._mask_candidates_kernel[(rows, width // 1024)](
            *(logits, None, ends, flags, width, 1, 0, 1, width, blocks, block, False),
            *(1, 1024),
        ),
    }
    for name, launch in launches.items():
        yield Case("candidates", f"V4.1, {name}", launch)


def norms(op: Load) -> Iterator[Case]:
    """The RMS norms of attention's projections."""
    for name, rank in (("Flash", 1024), ("Pro", 1536)):
        yield Case(
            "norm",
            f"{name} q and kv",
            partial(
                op("fused_qk_rmsnorm").fused_q_kv_rmsnorm,
                *(meta(16, rank), meta(16, HEAD_DIM), meta(rank), meta(HEAD_DIM)),
                1e-6,
            ),
        )


def draft_norms(op: Load) -> Iterator[Case]:
    """The RMS norms of the draft model, in a release with a folder for XPU."""
    for name, hidden in (("Flash", 4096), ("Pro", 7168)):
        yield Case(
            "norm",
            f"{name} draft input",
            partial(
                launcher(op("fused_mtp_input_rmsnorm"), "fused_mtp_input_rmsnorm"),
                meta(16, hidden),
                meta(16, dtype=i64),
                meta(16, 4, hidden),
                meta(hidden),
                meta(hidden),
                1e-6,
                4,
            ),
        )
        yield Case(
            "norm",
            f"{name} draft head",
            partial(
                launcher(op("fused_mtp_input_rmsnorm"), "mtp_shared_head_rmsnorm"),
                *(meta(16, hidden), meta(hidden), 1e-6),
            ),
        )


def launcher(module: ModuleType, name: str) -> Callable[..., Any]:
    """The function `name`, or the launcher object that replaces it in v0.33.0."""
    launched = f"_{name.upper()}_KERNEL"
    found: Callable[..., Any] = getattr(module, name, None) or getattr(module, launched)
    return found
