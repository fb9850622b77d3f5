# SPDX-License-Identifier: Apache-2.0
"""The base's own linters on what a step touches: nothing worse than before it."""

import contextlib
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xpustack.base.store import Store
from xpustack.core import fingerprint
from xpustack.core.cache import Cache
from xpustack.core.process import Runner
from xpustack.lint import hooks
from xpustack.lint.base_tools import TIMEOUT, Linters, base_environment
from xpustack.lint.finding import Finding
from xpustack.lint.moving_tree import MovingTree
from xpustack.lint.warm_mypy import WarmMypy
from xpustack.series.tree import Tree

RECIPE = ("lint.linter", "lint.mypy_program", "lint.script_host")
"""What takes part beside what this module imports: programs of their own."""
_ALIVE = 2
"""Releases whose checked-out tree and mypy stay: two take turns near their ends."""


@dataclass(frozen=True)
class Lint:
    """New findings of a step, how many the base had in the same files, what was
    run, and notes on tools that could not run or differ in version."""

    new: tuple[Finding, ...]
    old: int
    tools: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def key_of(before: Tree, after: Tree) -> str:
    return fingerprint.digest(
        before=before.tree_id,
        after=after.tree_id,
        tool=fingerprint.tool(*RECIPE),
        environment=fingerprint.lock(),
    )


def touched(before: Tree, after: Tree) -> tuple[str, ...]:
    """The paths in which `after` differs from its ancestor `before`, sorted."""
    later = [tree for tree in after.applied if tree.index > before.index]
    return tuple(sorted({path for tree in later for path in tree.changed}))


class Linter:
    """Lints of one run, by what the lints before them left: for each release a
    checked-out tree that moves from step to step, and a mypy that has read it.

    Any number of threads may ask. Nothing stays behind: it ends with `close`, its
    processes also with `Runner.stop` and with the tool.
    """

    def __init__(self, runner: Runner, cache: Cache, store: Store) -> None:
        self._runner, self._cache, self._store = runner, cache, store
        self._guard = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._scratch: Path | None = None
        self._count = 0
        self._benches: dict[str, _Bench] = {}

    def close(self) -> None:
        with self._guard:
            for bench in self._benches.values():
                bench.close()
            self._benches.clear()
            self._stack.close()
            self._scratch = None

    def lint(self, before: Tree, after: Tree, *, later: Collection[str] = ()) -> Lint:
        """Lint the files in which the trees differ, inside each tree, and compare.

        Args:
            later: the paths that all lints of the release ask about; without them
                this is the only one, and nothing is prepared for another.

        Raises:
            EnvironmentProblem: ruff is not of the base's version, or a tool broke.
            SourceError: the base's lint configuration is not understood.
            Stopped: the runner was stopped.
        """
        paths = touched(before, after)
        with self._bench(after.release.name) as bench:
            bench.mypy.later = frozenset(later)
            bench.mypy.moved(bench.tree.move(before))
            asked = hooks.read(bench.tree.folder, after.release.name)
            linters = Linters(self._runner, asked, bench.tree, bench.work, bench.mypy)
            old = linters.findings(paths)
            bench.mypy.moved(bench.tree.move(after))
            new = linters.findings(paths)
            notes, bench.mypy.notes = bench.mypy.notes, []
        return Lint(
            new=worse(old, new),
            old=len(old),
            tools=tuple(linters.tools),
            notes=(*asked.notes, *notes),
            seconds=linters.seconds,
        )

    @contextlib.contextmanager
    def _bench(self, release: str) -> Iterator["_Bench"]:
        """The release's bench, for one thread at a time. After an exception it is
        not used again."""
        bench = self._taken(release)
        try:
            yield bench
        except BaseException:
            with self._guard:
                if self._benches.get(release) is bench:
                    del self._benches[release]
            bench.close()
            raise
        finally:
            bench.busy.release()

    def _taken(self, release: str) -> "_Bench":
        while True:
            with self._guard:
                bench = self._benches.pop(release, None) or self._new()
                # The last one is the one used last.
                self._benches[release] = bench
                self._discard()
            bench.busy.acquire()
            with self._guard:
                if self._benches.get(release) is bench:
                    return bench
            bench.busy.release()

    def _new(self) -> "_Bench":
        if self._scratch is None:
            self._scratch = self._stack.enter_context(self._cache.scratch())
        self._count += 1
        work = self._scratch / str(self._count)
        tree = MovingTree(self._store, work / "tree", work / "index")
        env = base_environment(work)
        mypy = WarmMypy(self._runner, self._cache, tree.folder, work, env, TIMEOUT)
        return _Bench(work, tree, mypy)

    def _discard(self) -> None:
        for name, bench in list(self._benches.items())[:-1]:
            if len(self._benches) <= _ALIVE:
                return
            if not bench.busy.locked():
                del self._benches[name]
                bench.close()


@dataclass(frozen=True)
class _Bench:
    """A release's tree, its mypy and their folder; `busy` while they are used."""

    work: Path
    tree: MovingTree
    mypy: WarmMypy
    busy: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        self.mypy.close()
        shutil.rmtree(self.work, ignore_errors=True)


def lint(runner: Runner, cache: Cache, store: Store, before: Tree, after: Tree) -> Lint:
    """One lint alone, as `Linter.lint`."""
    with contextlib.closing(Linter(runner, cache, store)) as linter:
        return linter.lint(before, after)


def worse(before: Sequence[Finding], after: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of `after` that `before` does not have.

    A complaint that moved with its line is the same one; a complaint of one kind
    in one file whose line was edited takes the place of one that vanished.
    """
    known = Counter(finding.key for finding in before)
    left = []
    for finding in after:
        if known[finding.key]:
            known[finding.key] -= 1
        else:
            left.append(finding)
    vanished: Counter[tuple[str, str, str]] = Counter()
    for key, count in known.items():
        vanished[key[:3]] += count
    fresh = []
    for finding in left:
        if vanished[finding.kind]:
            vanished[finding.kind] -= 1
        else:
            fresh.append(finding)
    return tuple(fresh)
