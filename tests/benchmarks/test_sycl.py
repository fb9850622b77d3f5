# SPDX-License-Identifier: Apache-2.0
"""The pin's ops as candidates: stand-ins with their schemas take the calls."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from kernels.interpreter import repair
repair()
import torch
from pathlib import Path
from benchmarks import indexer, layer
from benchmarks.workload import SYCL, Competitors
found = Competitors(Path("nowhere"), lambda path: None)
cpu = torch.device("cpu")
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


def run(**environment: str) -> str:
    """What the program prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_op_is_called_as_it_wants_to_be() -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "emulated_xpu/standins")))
    printed = run(PYTHONPATH=paths, EMULATED_XPU_KERNELS="0.1.15.4")
    assert printed.splitlines() == [
        "paged ['']",
        "flat ['']",
        "insert ['']",
        "mhc ['']",
    ]


def test_without_them_nothing_is_called() -> None:
    printed = run(PYTHONPATH=str(ROOT))
    assert printed.splitlines() == ["paged []", "flat []", "insert []", "mhc []"]
