# SPDX-License-Identifier: Apache-2.0
"""The mypy that stays against new ones on a real release: many minutes, so only on
request: `XPUSTACK_REAL_MYPY=v0.33.0 pytest tests/tool/lint/test_real_mypy.py`."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xpustack.base import releases
from xpustack.base.store import Store
from xpustack.core.cache import Cache
from xpustack.core.process import Runner
from xpustack.core.project import Project
from xpustack.lint.hook_runner import TIMEOUT, base_environment
from xpustack.lint.linter import touched
from xpustack.lint.moving_tree import MovingTree
from xpustack.lint.warm_mypy import WarmMypy
from xpustack.series.apply import trees
from xpustack.series.tree import Tree

RELEASE = os.environ.get("XPUSTACK_REAL_MYPY", "")
FLAGS = ("--python-version", f"{sys.version_info.major}.{sys.version_info.minor}")
PLANTED = "\nplanted: int = 'no'\nplanted.nothing()\n"
CALLERS = 20
# An edit somewhere in vLLM, and what a file that it breaks has in it.
EDITS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "an argument more": (
        "vllm/forward_context.py",
        lambda text: text.replace(
            "def get_forward_context()", "def get_forward_context(planted: str)"
        ),
        "get_forward_context",
    ),
    "another name": (
        "vllm/v1/attention/ops/common.py",
        lambda text: re.sub(r"def (\w+)\(", r"def \1_renamed(", text, count=1),
        r"attention\.ops\.common import",
    ),
    "another type of a field": (
        "vllm/config/parallel.py",
        lambda text: text.replace(
            "tensor_parallel_size: int", "tensor_parallel_size: str"
        ),
        "tensor_parallel_size",
    ),
}

pytestmark = pytest.mark.skipif(not RELEASE, reason="XPUSTACK_REAL_MYPY names none")


class Bench:
    """A real release's trees, one at a time, and both ways to ask about them."""

    def __init__(self, project: Project, cache: Cache, work: Path) -> None:
        store = Store(cache)
        release = releases.load(project)[RELEASE]
        self.trees = trees(store, project, release).trees
        self.tree = MovingTree(store, work / "tree", work / "index")
        self.folder = self.tree.folder
        self._mypy = (Runner(), cache, self.folder, work, base_environment(work))
        self.warm = WarmMypy(*self._mypy, TIMEOUT)
        self.warm.later = frozenset(touched(self.trees[0], self.trees[-1]))

    def move(self, tree: Tree) -> None:
        self.warm.moved(self.tree.move(tree))

    def edit(self, path: str, change: Callable[[str], str]) -> None:
        place = self.folder / path
        text = place.read_text()
        assert change(text) != text, f"{path} is not what it was: adapt the test"
        place.write_text(change(text))
        self.warm.moved([path])

    def restore(self, *paths: str) -> None:
        self.tree.restore()
        self.warm.moved(paths)

    def users(self, pattern: str) -> list[str]:
        """Some files of vLLM that have a match."""
        files = (path for path in sorted(self.folder.glob("vllm/**/*.py")))
        using = (path for path in files if re.search(pattern, path.read_text()))
        return [
            path.relative_to(self.folder).as_posix()
            for path in itertools.islice(using, CALLERS)
        ]

    def compare(self, paths: list[str]) -> list[str]:
        files = sorted(
            path
            for path in set(paths)
            if path.startswith("vllm/")
            and path.endswith(".py")
            and (self.folder / path).is_file()
        )
        messages = _errors(self.warm.check(FLAGS, files).stdout)
        # The other one's caches are made for this comparison alone.
        new = WarmMypy(*self._mypy, TIMEOUT)
        new._work = self.folder.parent / f"new-{len(os.listdir(self.folder.parent))}"
        assert messages == _errors(new._run_new(FLAGS, files).stdout)
        return messages


def _errors(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if ": error:" in line)


@pytest.fixture(scope="module")
def bench(real_project: Project, real_cache: Cache) -> Iterator[Bench]:
    with real_cache.scratch() as work:
        bench = Bench(real_project, real_cache, work)
        yield bench
        bench.warm.close()


def test_every_third_step_forward_and_back(bench: Bench):
    pairs = list(itertools.pairwise(bench.trees))
    for before, after in [*pairs[::3], *pairs[::-3]]:
        paths = [*touched(before, after)]
        for tree in (before, after):
            bench.move(tree)
            bench.compare(paths)


def test_errors_in_the_files_of_a_step(bench: Bench):
    before, after = bench.trees[-3:-1]
    bench.move(after)
    paths = [*touched(before, after)]
    clean = bench.compare(paths)
    for path in paths:
        bench.edit(path, lambda text: text + PLANTED)
    assert len(bench.compare(paths)) == len(clean) + 2 * len(paths)
    bench.restore(*paths)
    assert bench.compare(paths) == clean


@pytest.mark.parametrize("name", EDITS)
def test_errors_in_callers_that_the_step_does_not_touch(bench: Bench, name: str):
    path, change, pattern = EDITS[name]
    bench.move(bench.trees[len(bench.trees) // 2])
    paths = [path, *bench.users(pattern)]
    clean = bench.compare(paths)
    bench.edit(path, change)
    assert len(bench.compare(paths)) > len(clean)
    bench.restore(path)
    assert bench.compare(paths) == clean
