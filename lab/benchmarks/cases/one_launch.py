# SPDX-License-Identifier: Apache-2.0
"""Each attention kernel once, for compute-sanitizer.

Small inputs, 64 heads. Decode has key splits, so its merge runs too. For races:

    compute-sanitizer --tool racecheck --racecheck-report all \\
        --kernel-name kernel_substring=_merge_kernel \\
        python3 -m lab.benchmarks.cases.one_launch

Run initcheck without `--kernel-name`: with it, it reported reads of the pages, which
torch's kernels had written.
"""

import sys
from collections.abc import Callable

import torch

from kernels.xpu_dsv4.kv.qnorm_rope_kv_insert import xpu_qnorm_rope_kv_fp8_insert
from kernels.xpu_dsv4.mla.sparse_decode import xpu_sparse_decode_fp8
from kernels.xpu_dsv4.mla.sparse_prefill import xpu_sparse_prefill

from .attention import BLOCK, DIM, NOPE, PAGE, ROPE, SCALE, random_pages

HEADS, BLOCKS, TOPK, WINDOW = 64, 8, 96, 64


def decode(device: torch.device) -> torch.Tensor:
    """Attention `[2, heads, 512]` of two tokens with other numbers of keys."""
    pages = random_pages(BLOCKS, device)
    q = torch.randn(2, HEADS, DIM, device=device).bfloat16()
    slots = torch.randint(BLOCKS * BLOCK, (2, TOPK + WINDOW), device=device).int()
    out = torch.empty_like(q)
    xpu_sparse_decode_fp8(
        q=q,
        kv_cache=pages,
        swa_kv_cache=pages,
        swa_only=False,
        topk_indices=slots[:, :TOPK],
        topk_lens=torch.tensor([90, 17], device=device, dtype=torch.int32),
        swa_indices=slots[:, TOPK:],
        swa_lens=torch.tensor([60, 33], device=device, dtype=torch.int32),
        attn_sink=torch.randn(HEADS, device=device),
        softmax_scale=SCALE,
        head_dim=DIM,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        out=out,
    )
    return out


def prefill(device: torch.device) -> torch.Tensor:
    """Attention `[3, heads, 512]` over gathered keys."""
    q = torch.randn(3, HEADS, DIM, device=device).bfloat16()
    kv = torch.randn(200, 1, DIM, device=device).bfloat16()
    indices = torch.randint(200, (3, 160), device=device).int()
    lens = torch.tensor([160, 70, 1], device=device, dtype=torch.int32)
    sink = torch.randn(HEADS, device=device)
    return xpu_sparse_prefill(q, kv, indices, SCALE, sink, lens)


def insert(device: torch.device) -> torch.Tensor:
    """q `[3, heads, 512]` after norm and RoPE; one of three tokens has no slot."""
    q = torch.randn(3, HEADS, DIM, device=device).bfloat16()
    xpu_qnorm_rope_kv_fp8_insert(
        q,
        torch.randn(3, DIM, device=device).bfloat16(),
        torch.zeros(2, PAGE, dtype=torch.uint8, device=device),
        torch.tensor([0, 70, -1], device=device),
        torch.arange(3, device=device),
        torch.randn(16, ROPE, device=device),
        1e-6,
        BLOCK,
    )
    return q


LAUNCHES: tuple[Callable[[torch.device], torch.Tensor], ...] = (decode, prefill, insert)


def main() -> None:
    """Launch all on the GPU; exit with 1 if a result is not finite."""
    torch.manual_seed(0)
    for launch in LAUNCHES:
        finite = bool(launch(torch.device("cuda")).isfinite().all())
        print(f"{launch.__name__}: {'finite' if finite else 'not finite'}", flush=True)
        if not finite:
            sys.exit(1)


if __name__ == "__main__":
    main()
