# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.host`: time of the host per call, with launches stubbed.

Decode to bf16, insert and inverse RoPE, as a decode layer of 16 tokens and 64 heads
calls them. `--beside FOLDER` measures the kernels of another checkout too, in turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from triton.runtime import KernelInterface

ROOT = Path(__file__).parents[2]
CALLS, ROUNDS = 2000, 7
TOKENS, HEADS, DIM, ROPE, TOPK, WINDOW = 16, 64, 512, 64, 512, 128


def calls() -> dict[str, Callable[[], object]]:
    """Each op's call, of the `kernels` that Python finds."""
    import torch

    from kernels.xpu_dsv4.kv.qnorm_rope_kv_insert import (
        xpu_qnorm_rope_kv_fp8_insert,
    )
    from kernels.xpu_dsv4.mla.inv_rope import inv_rope_bf16
    from kernels.xpu_dsv4.mla.sparse_decode import xpu_sparse_decode_fp8

    q = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    pages = torch.zeros(64, 64, 584, dtype=torch.uint8)
    lens = torch.zeros(TOKENS, dtype=torch.int32)
    topk = torch.zeros(TOKENS, 1, TOPK, dtype=torch.int32)
    window = torch.zeros(TOKENS, 1, WINDOW, dtype=torch.int32)
    sink, out = torch.zeros(HEADS), torch.empty_like(q)
    workspace = torch.empty(1 << 24)
    table = torch.zeros(64, ROPE)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    kv = torch.zeros(TOKENS, DIM, dtype=torch.bfloat16)
    decoded = (q, pages, pages, False, topk, lens, window, lens, sink, DIM**-0.5)
    dims = (DIM, DIM - ROPE, ROPE)
    return {
        "decode": lambda: xpu_sparse_decode_fp8(
            *decoded, *dims, out, workspace=workspace
        ),
        "insert": lambda: xpu_qnorm_rope_kv_fp8_insert(
            q, kv, pages, positions, positions, table, 1e-6, 64
        ),
        "inverse RoPE": lambda: inv_rope_bf16(q, positions, table, 8, 8),
    }


def launches_of(call: Callable[[], object]) -> int:
    """How many kernels a call launches; none of them runs."""
    with patch.object(KernelInterface, "__getitem__") as stub:
        call()
    return stub.call_count


def measure() -> dict[str, float]:
    """Microseconds of each op's call, the median of `ROUNDS`."""
    found = {}
    for name, call in calls().items():
        assert launches_of(call), f"{name} launches nothing"
        with patch.object(
            KernelInterface, "__getitem__", lambda kernel, grid: _nothing
        ):
            found[name] = statistics.median(_round(call) for _ in range(ROUNDS))
    return found


def _nothing(*arguments: object, **options: object) -> None:
    """What stands for a launch."""


def _round(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - started) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        sys.path[0] = str(options.of)
        print(json.dumps(measure()))
        return
    roots = [ROOT, *([options.beside.resolve()] if options.beside else [])]
    taken: dict[Path, list[dict[str, float]]] = {root: [] for root in roots}
    for _ in range(options.rounds):
        for root in roots:
            command = [sys.executable, __file__, "--of", str(root)]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True
            )
            taken[root].append(json.loads(done.stdout))
    for root, rounds in taken.items():
        medians = {
            name: statistics.median(r[name] for r in rounds) for name in rounds[0]
        }
        each = ", ".join(f"{name} {value:.1f}" for name, value in medians.items())
        total = sum(medians.values())
        print(f"{root.name}: {each}, together {total:.1f} us of the host per call")


if __name__ == "__main__":
    main()
