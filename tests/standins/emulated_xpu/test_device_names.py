# SPDX-License-Identifier: Apache-2.0
"""Code that this repository changes names of torch's devices what an XPU has.

In a torch without CUDA the names of `torch.cuda` raise. vLLM's XPU model runner
replaces some. A function that a series changes or brings may use those of its own
release alone: an XPU may now come to a line that it never came to before.
"""

import ast
import functools
import re
from dataclasses import dataclass

import pytest
import torch

from stack.base.releases import load
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.project import Project
from stack.series.apply import trees

RUNNER = "vllm/v1/worker/xpu_model_runner.py"
REPLACED = re.compile(r"^ +torch\.cuda\.(\w+) = ", re.MULTILINE)
FILE = re.compile(r"^\+\+\+ b/(.+\.py)$", re.MULTILINE)
HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
NAMED = re.compile(r"\b(?:cuda|xpu|accelerator)\b")
"""What a file says that uses one of the devices' modules."""
MODULES = {f"torch.{name}": getattr(torch, name) for name in ("xpu", "accelerator")}
UNREACHED: dict[str, str] = {}
"""Names of torch.cuda that no XPU comes to, with the reason."""


@dataclass(frozen=True)
class Use:
    """A name of a device's module in a changed function."""

    path: str
    function: str
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}: {self.function}: {self.module}.{self.name}"


class Tips:
    """What the whole series of each release changes, read once."""

    def __init__(self, project: Project, cache: Cache) -> None:
        self.store, self.project = Store(cache), project
        self._read: dict[str, tuple[set[str], list[Use]]] = {}

    def __call__(self, release: str) -> tuple[set[str], list[Use]]:
        """The names of torch.cuda that the runner replaces, and the uses."""
        if release not in self._read:
            grown = trees(self.store, self.project, load(self.project)[release]).trees
            base, tip = grown[0].tree_id, grown[-1].tree_id
            git = self.store.git
            runner = git.file(tip, RUNNER).decode()
            found = []
            diff = git.diff(base, tip, context=0).decode("utf-8", "replace")
            for part in diff.split("\ndiff --git "):
                if changed := FILE.search(part):
                    text = git.file(tip, changed[1]).decode()
                    found += uses(changed[1], text, frozenset(changed_lines(part)))
            self._read[release] = set(REPLACED.findall(runner)), found
        return self._read[release]


def changed_lines(part: str) -> set[int]:
    """The lines that a file's diff adds; beside a deletion, the line before it."""
    lines: set[int] = set()
    for hunk in HUNK.finditer(part):
        start, count = int(hunk[1]), int(hunk[2] or 1)
        lines.update(range(start, start + max(count, 1)))
    return lines


@functools.cache
def uses(path: str, text: str, changed: frozenset[int]) -> list[Use]:
    """The names of devices in the functions that have one of the `changed` lines.

    Releases have files in common: each is read once."""
    found: list[Use] = []
    if not NAMED.search(text):
        return found
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        end = function.end_lineno or function.lineno
        if changed.isdisjoint(range(function.lineno, end + 1)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                module = ast.unparse(node.value)
                if module in ("torch.cuda", *MODULES):
                    found.append(Use(path, function.name, module, node.attr))
    return found


@pytest.fixture(scope="module")
def tips(real_project: Project, real_cache: Cache) -> Tips:
    return Tips(real_project, real_cache)


RELEASES = load(Project.find()).names


@pytest.mark.parametrize("release", RELEASES)
def test_the_runner_replaces_what_is_asked_of_cuda(release: str, tips: Tips) -> None:
    replaced, found = tips(release)
    assert found
    for use in found:
        assert (
            use.module != "torch.cuda" or use.name in replaced or str(use) in UNREACHED
        ), f"{use} raises on XPU: the runner of {release} replaces {sorted(replaced)}"


@pytest.mark.parametrize("release", RELEASES)
def test_torch_has_what_is_asked_of_xpu(release: str, tips: Tips) -> None:
    for use in tips(release)[1]:
        if use.module in MODULES:
            assert use.name in MODULES[use.module].__all__, use


def test_each_exception_is_used(tips: Tips) -> None:
    found = {str(use) for release in RELEASES for use in tips(release)[1]}
    assert found >= UNREACHED.keys()


def test_a_changed_condition_counts() -> None:
    """The line that asks may be the same as before, as in v0.33.0's compressor."""
    text = "def forward():\n    if ready:\n        torch.cuda.synchronize()\n"
    (use,) = uses("a.py", text, frozenset({2}))
    assert (use.module, use.name) == ("torch.cuda", "synchronize")
    assert not uses("a.py", text + "\n\nvalue = 1\n", frozenset({6}))
