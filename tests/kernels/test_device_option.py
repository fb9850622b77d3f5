# SPDX-License-Identifier: Apache-2.0
"""A run says where its kernels ran, and runs nowhere that it was not told to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest on one module, in a process of its own that sees no GPU."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/kernels/test_checks.py"),
            *("-p", "no:cacheprovider", *options),
        ],
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "CUDA_VISIBLE_DEVICES": "",
            "ZE_AFFINITY_MASK": "",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_without_the_option_nothing_runs():
    done = run()
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "say where kernels run: --device xpu|cuda|interpreter" in done.stdout


@pytest.mark.parametrize("kind", ["xpu", "cuda"])
def test_a_gpu_that_is_not_there_is_no_reason_to_interpret(kind: str):
    done = run("--device", kind)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"sees no {kind} device" in done.stdout
    assert "next: python -m xpustack device" in done.stdout


def test_the_first_and_the_last_line_say_what_it_was():
    done = run("--device", "interpreter")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    said = "device: none, kernels are interpreted on the CPU (--device interpreter)"
    first, last = (i for i, line in enumerate(lines) if line == said)
    collected = next(i for i, line in enumerate(lines) if "collected" in line)
    assert first < collected and last == len(lines) - 2, done.stdout
