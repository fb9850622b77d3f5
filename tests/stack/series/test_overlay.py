# SPDX-License-Identifier: Apache-2.0
"""The modules that a step adds with a kernel, and the imports that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_stack import FakeStack

from stack.core.errors import SeriesError
from stack.series.overlay import kernel_closure, overlay_files
from stack.series.patch import load_series
from stack.series.tree import Step


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def with_gather(stack: FakeStack) -> Step:
    step = load_series(stack.project, "v1.0")[2]
    return replace(step, trailers=replace(step.trailers, kernels=("kv/gather",)))


def test_a_kernel_brings_what_it_imports(stack: FakeStack) -> None:
    files = kernel_closure(stack.project, with_gather(stack))
    assert list(files) == [
        "__init__.py",
        "_launch.py",
        "_triton.py",
        "kv/__init__.py",
        "kv/gather.py",
    ]


@pytest.mark.parametrize(
    "source", ["from .kv import gather\n", "from .kv.gather import _launch\n"]
)
def test_a_kernel_brings_one_of_another_folder(stack: FakeStack, source: str) -> None:
    stack.write("kernels/xpu_dsv4/decode.py", source)
    files = kernel_closure(stack.project, load_series(stack.project, "v1.0")[2])
    assert {"kv/__init__.py", "kv/gather.py", "_launch.py"} < files.keys()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from ...reference import decode\n", "from above its package"),
        ("from kernels.xpu_dsv4 import decode\n", "by an absolute name"),
        ("import vllm\n", "by an absolute name"),
        ("from .missing import x\n", "no kernel module kv/missing"),
        ("def (\n", "not Python"),
    ],
)
def test_what_cannot_come_along(stack: FakeStack, source: str, problem: str) -> None:
    step = with_gather(stack)
    stack.write("kernels/xpu_dsv4/kv/gather.py", source)
    with pytest.raises(SeriesError, match=problem) as caught:
        kernel_closure(stack.project, step)
    assert (caught.value.release, caught.value.step) == ("v1.0", "third")


def test_the_overlay_of_the_release_wins(stack: FakeStack) -> None:
    path = "vllm/xpu/layer.py"
    step = load_series(stack.project, "v1.0")[2]
    common = stack.project.overlay / "common" / path
    assert overlay_files(stack.project, step)[path].source == common
    own = stack.write(f"vllm_overlay/v1.0/{path}", "LAYER = 3\n")
    assert overlay_files(stack.project, step)[path].source == own
    other = replace(step, release="v2.0")
    assert overlay_files(stack.project, other)[path].source == common
