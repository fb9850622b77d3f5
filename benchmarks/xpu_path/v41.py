# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.xpu_path.v41 RESULTS`: V4.1 on a GPU beside the CPU.

Serves the prompts of the jobs `v41-*` on the emulated XPU, and holds what came back
from the GPU to the same bounds and tokens. Writes docs/data/v41.csv.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from e2e import checks, v41, v41_checks
from e2e.ranks import near_ties
from e2e.serving import Job, Prompt, Served, opened_engines
from e2e.v41_twin import V41Twin
from xpustack.core.cache import Cache
from xpustack.core.rows import csv_text

from .jobs import V41_MIXED

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs/data/v41.csv"
KIND = "v4.1"
ON_GPU = {"v41-eager": "GPU, eager", "v41-graphs": "GPU, graphs"}
WAVE = tuple(Prompt(*numbers) for numbers in V41_MIXED)
JOB = Job(KIND, (WAVE,), v41.SERVER, checkpoint=KIND)


def rows_of(where: str, served: Served, twin: V41Twin) -> list[dict[str, Any]]:
    """The errors of each prompt and layer.

    Raises:
        AssertionError: one is beyond its bound.
    """
    twin.look_at(served)
    errors = checks.check_attention(served, twin)
    checks.check_experts(served, twin)
    v41_checks.check_streams(served, twin)
    checks.check_logits(served, twin)
    return [
        {
            "where": where,
            "tokens": error.tokens,
            "layer": error.layer,
            "ratio": error.ratio,
            "float32 %": f"{100 * error.plain:.2f}",
            "core %": f"{100 * error.core:.2f}",
            "output %": f"{100 * error.output:.3f}",
            "overlap": "" if error.overlap is None else f"{error.overlap:.4f}",
        }
        for error in errors
    ]


def main() -> None:
    """Compare, write the rows, and print the tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", default="v0.33.0", help="the release of RESULTS")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as made,
        opened_engines(Path(made), Cache.default()) as engines,
    ):
        one = engines.serve(arguments.release, JOB)
        twin = engines.twin_of(KIND)
        assert isinstance(twin, V41Twin)
        rows = rows_of("CPU", one, twin)
        print("CPU", one.new_tokens())
        for name, where in ON_GPU.items():
            file = arguments.results / f"{name}.pt"
            if not file.is_file():
                print(f"{where}: not there")
                continue
            served = Served(JOB, torch.load(file, weights_only=False), "", 0.0)
            rows += rows_of(where, served, twin)
            print(where, served.new_tokens(), near_ties([served], one, twin))
    DATA.write_text(csv_text(rows))


if __name__ == "__main__":
    main()
