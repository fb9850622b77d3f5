# SPDX-License-Identifier: Apache-2.0
"""The emulated XPU answers as each release's own XPU platform does, but for a list that
says why.

The classes are read, not imported: what a name overrides differs from one release to
another. test_platform.py asks the running platform.
"""

import ast
from pathlib import Path
from typing import Any

import pytest

from stack.base.releases import load
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.project import Project
from stack.series.apply import trees
from standins import emulated_xpu

RELEASES = load(Project.find()).names
PLATFORMS = {"xpu": "XPUPlatform", "interface": "Platform", "cpu": "CpuPlatform"}
"""vLLM's classes by module: XPU's, its base, and what is asked where tensors are the
CPU's."""


def source(file: str) -> str:
    (folder,) = emulated_xpu.__path__
    return (Path(folder) / file).read_text(encoding="utf-8")


DECISIONS = source("decisions.py")
ON_CPU, ON_CUDA = source("platform.py"), source("on_cuda/platform.py")


def class_of(text: str, name: str) -> ast.ClassDef:
    (found,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return found


def defined(owner: ast.ClassDef) -> set[str]:
    """The methods and attributes in a class's body."""
    names = set()
    for part in owner.body:
        if isinstance(part, ast.FunctionDef):
            names.add(part.name)
        elif isinstance(part, ast.AnnAssign):
            names.add(ast.unparse(part.target))
        elif isinstance(part, ast.Assign):
            names.update(map(ast.unparse, part.targets))
    return names


def own_answers() -> dict[str, Any]:
    (listed,) = (
        node.value
        for node in ast.parse(DECISIONS).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "OWN_ANSWERS"
    )
    found: dict[str, Any] = ast.literal_eval(listed)
    return found


class Tips:
    """vLLM's platforms at the tip of each release."""

    def __init__(self, project: Project, cache: Cache) -> None:
        self.store, self.project = Store(cache), project

    def __call__(self, release: str) -> dict[str, ast.ClassDef]:
        tip = trees(self.store, self.project, load(self.project)[release]).tip
        return {
            name: class_of(
                self.store.git.file(
                    tip.tree_id, f"vllm/platforms/{module}.py"
                ).decode(),
                name,
            )
            for module, name in PLATFORMS.items()
        }


@pytest.fixture(scope="module")
def tips(real_project: Project, real_cache: Cache) -> Tips:
    return Tips(real_project, real_cache)


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_emulation_answers_itself_is_listed(release: str, tips: Tips) -> None:
    asked = set[str]().union(*map(defined, tips(release).values()))
    own = defined(class_of(DECISIONS, "XpuDecisions"))
    on_cpu = own | defined(class_of(ON_CPU, "EmulatedXpuPlatform"))
    on_cuda = own | defined(class_of(ON_CUDA, "XpuPathOnCudaPlatform"))
    assert on_cpu & asked == own_answers().keys()
    assert on_cuda & asked <= own_answers().keys()


def test_the_rest_is_the_releases_own() -> None:
    bases = [class_of(DECISIONS, "XpuDecisions").bases]
    bases += [class_of(ON_CPU, "EmulatedXpuPlatform").bases]
    bases += [class_of(ON_CUDA, "XpuPathOnCudaPlatform").bases]
    named = [ast.unparse(base) for of_class in bases for base in of_class]
    assert named == ["wheels_platform()", "XpuDecisions", "XpuDecisions"]
    assert "\nfrom vllm.platforms.xpu import XPUPlatform\n" in DECISIONS


def test_each_of_them_says_why() -> None:
    assert all(reason.strip() for reason in own_answers().values())
