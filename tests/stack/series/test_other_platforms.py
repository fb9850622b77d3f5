# SPDX-License-Identifier: Apache-2.0
"""Steps do not affect CUDA, ROCm and CPU: by the files they touch, or by a test."""

import ast
import re
from pathlib import Path

import pytest

from stack.core.project import Project
from stack.series.diff import FileDiff
from stack.series.patch import load_series
from stack.series.tree import Step

PROJECT = Project.find(Path(__file__).parent)
# The releases whose XPU model is a folder of its own.
RELEASES = ("v0.26.0", "v0.33.0")
# What upstream has wrong on every platform, or on the CPU alone.
FOR_ALL = {
    "thoughts-grammar",
    "swa-rope",
    "cpu-tile-scheduler",
    "fp8-experts",
    "inv-rope-launch",
    "online-arguments",
    "promoted-specs",
    "stage-groups",
    "stage-images",
    "whole-images",
    "nixl-host-blocks",
    "nixl-saved-chunks",
    "window-last-token",
}
PACKAGED = re.compile(rb'\+ +"[\w/.*]+",\n')
"""A line of `setup.py` that packages one more file."""
# Nothing that another platform runs: variables that only XPU's code reads, classes of
# XPU in a file of all, methods that only XPU's model calls, and branches on is_xpu()
# between modules of which only XPU's can be imported here.
OF_XPU_ALONE = {
    "experts",
    "nvfp4-draft",
    "packed-wo-a",
    "policy",
    "v41-indexer",
    "v41-mxfp8",
    "vision-model",
}

CASES = [
    pytest.param(step, id=f"{release}-{step.slug}")
    for release in RELEASES
    for step in load_series(PROJECT, release)
]


def shared(step: Step) -> list[str]:
    """Files of the step's patch that other platforms run too."""
    return [
        file.path
        for file in step.files
        if "xpu" not in file.path and not (file.path == "setup.py" and packages(file))
    ]


def packages(file: FileDiff) -> bool:
    """Whether the change only packages more files."""
    changed = [
        line
        for hunk in file.hunks
        for line in hunk.lines
        if line.startswith((b"+", b"-"))
    ]
    return all(PACKAGED.fullmatch(line) for line in changed)


def unchanged_tests(module: Path) -> list[str]:
    """Names of the tests that must pass before the step and after it."""
    names = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(mark.startswith("pytest.mark.unchanged") for mark in marks):
                names.append(node.name)
    return names


@pytest.mark.parametrize("step", CASES)
def test_a_shared_file_has_a_test_of_other_platforms(step: Step) -> None:
    if step.slug in FOR_ALL | OF_XPU_ALONE or not shared(step):
        return
    assert step.trailers.test is not None
    names = unchanged_tests(PROJECT.root / step.trailers.test)
    words = ("other_platforms", "cuda", "rocm")
    assert any(word in name for name in names for word in words), (
        f"{step.slug} touches {shared(step)}; what shows that CUDA, ROCm and CPU"
        f" keep theirs? Of {names} none says so"
    )


def test_the_exceptions_are_steps() -> None:
    slugs = {
        step.slug for release in RELEASES for step in load_series(PROJECT, release)
    }
    assert slugs >= FOR_ALL | OF_XPU_ALONE
