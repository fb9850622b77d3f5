# SPDX-License-Identifier: Apache-2.0
"""A run says where its kernels ran, and runs nowhere that it was not told to."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Forks

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A process that sees no GPU, and may be told that Triton interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    with Forks(["torch"], env, ROOT) as forks:
        yield forks


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Run:
    """pytest on one module, in a process of its own: its status and what it printed."""

    def run(*options: str) -> tuple[int, str]:
        words = ["-m", "pytest", "tests/kernels/test_checks.py"]
        words += ["-p", "no:cacheprovider", *options]
        return forks.run(words, tmp_path / "printed.txt")

    return run


def test_without_the_option_nothing_runs(run: Run):
    status, printed = run()
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "say where kernels run: --device xpu|cuda|interpreter" in printed


@pytest.mark.parametrize("kind", ["xpu", "cuda"])
def test_a_gpu_that_is_not_there_is_no_reason_to_interpret(kind: str, run: Run):
    status, printed = run("--device", kind)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"sees no {kind} device" in printed
    assert "next: xpustack device" in printed


def test_the_first_and_the_last_line_say_what_it_was(run: Run):
    status, printed = run("--device", "interpreter")
    assert status == 0, printed
    lines = printed.splitlines()
    said = "device: none, kernels are interpreted on the CPU (--device interpreter)"
    first, last = (i for i, line in enumerate(lines) if line == said)
    collected = next(i for i, line in enumerate(lines) if "collected" in line)
    assert first < collected and last == len(lines) - 2, printed
