# SPDX-License-Identifier: Apache-2.0
"""The pin's ops as candidates: stand-ins with their schemas take the calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from standins.interpreter import repair
repair()
import torch
from pathlib import Path
from lab.benchmarks.cases import indexer, layer
from lab.benchmarks.workload import SYCL, Competitors
cpu = torch.device("cpu")
for folder in (None, sys.argv[1]):
    if folder is not None:
        sys.path.insert(0, folder)
    found = Competitors(Path("nowhere"), lambda path: None)
    torch.manual_seed(0)
    for name, candidates in {
        "paged": indexer.decode(False, 2, 128, cpu, found),
        "flat": indexer.prefill(False, 3, 96, cpu, found),
        "insert": layer.insert(2, 16, found, cpu, 1),
        "mhc": layer.mixing(3, 256, found, cpu),
    }.items():
        named = [c for c in candidates if c.name == SYCL]
        print(name, [c.check() for c in named], flush=True)
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the program prints where the ops are not installed, and then where they
    are: one process, because its imports take longer than all its calls."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "standins/emulated_xpu/packages")],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "EMULATED_XPU_KERNELS": "0.1.15.4",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_op_is_called_as_it_wants_to_be(printed: list[str]) -> None:
    assert printed[4:] == ["paged ['']", "flat ['']", "insert ['']", "mhc ['']"]


def test_without_them_nothing_is_called(printed: list[str]) -> None:
    assert printed[:4] == ["paged []", "flat []", "insert []", "mhc []"]
