# SPDX-License-Identifier: Apache-2.0
"""Lint what a step touches with the base's own linters, before and after it."""

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
from xpustack.lint.finding import LintFinding
from xpustack.lint.hook_configuration import read_hooks
from xpustack.lint.hook_runner import TIMEOUT, HookRunner, base_environment
from xpustack.lint.moving_tree import MovingTree
from xpustack.lint.warm_mypy import WarmMypy
from xpustack.series.tree import Tree

RECIPE = ("lint.linter", "lint.mypy_program", "lint.script_host")
"""Modules whose sources decide a lint, besides what they import: the two programs
are started, not imported."""
_RELEASES_KEPT = 2
"""How many releases keep their checked-out tree and mypy: near its end, one
release's lints alternate with the next one's."""


@dataclass(frozen=True)
class LintResult:
    """New findings of a step, how many the base had in the same files, what was
    run, and notes on tools that could not run or differ in version."""

    new: tuple[LintFinding, ...]
    old: int
    tools: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def lint_key(before: Tree, after: Tree) -> str:
    """Where the cache keeps the lint result of one tree over another."""
    key = fingerprint.digest(
        before=before.tree_id,
        after=after.tree_id,
        tool=fingerprint.tool(*RECIPE),
        environment=fingerprint.lock(),
    )
    return f"lint-{key}"


def touched(before: Tree, after: Tree) -> tuple[str, ...]:
    """The paths in which `after` differs from its ancestor `before`, sorted."""
    later = [tree for tree in after.applied if tree.index > before.index]
    return tuple(sorted({path for tree in later for path in tree.changed}))


class Linter:
    """Lints trees, and reuses what earlier lints of the release left: a checked-out
    tree that moves from step to step, and a mypy that has read it.

    Any number of threads may call it. `close` removes everything; `Runner.stop` and
    the end of the tool stop its processes as well.
    """

    def __init__(self, runner: Runner, cache: Cache, store: Store) -> None:
        self._runner, self._cache, self._store = runner, cache, store
        self._guard = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._scratch: Path | None = None
        self._count = 0
        self._free_trees: list[MovingTree] = []
        self._benches: dict[str, _Bench] = {}

    def close(self) -> None:
        with self._guard:
            for bench in self._benches.values():
                bench.close()
            self._benches.clear()
            self._free_trees.clear()
            self._stack.close()
            self._scratch = None

    def lint(
        self, before: Tree, after: Tree, *, later: Collection[str] = ()
    ) -> LintResult:
        """Lint the files in which the trees differ, inside each tree, and compare.

        Args:
            later: the paths that later lints of the release may check. Without
                them this lint is the only one and prepares nothing for another.

        Raises:
            EnvironmentProblem: ruff is not of the base's version, or a tool broke.
            SourceError: the base's lint configuration is not understood.
            Stopped: the runner was stopped.
        """
        paths = touched(before, after)
        with self._bench(after) as bench:
            bench.mypy.later = frozenset(later)
            bench.mypy.moved(bench.tree.move(before))
            hooks = read_hooks(bench.tree.folder, after.release.name)
            hook_runner = HookRunner(
                self._runner, hooks, bench.tree, bench.work, bench.mypy
            )
            old = hook_runner.findings(paths)
            bench.mypy.moved(bench.tree.move(after))
            new = hook_runner.findings(paths)
            notes, bench.mypy.notes = bench.mypy.notes, []
        return LintResult(
            new=new_findings(old, new),
            old=len(old),
            tools=tuple(hook_runner.tools),
            notes=(*hooks.notes, *notes),
            seconds=hook_runner.seconds,
        )

    @contextlib.contextmanager
    def _bench(self, tree: Tree) -> Iterator["_Bench"]:
        """The bench of the tree's release, for one thread at a time. An exception
        discards it."""
        release = tree.release.name
        bench = self._acquire(tree)
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

    def _acquire(self, tree: Tree) -> "_Bench":
        release = tree.release.name
        while True:
            with self._guard:
                bench = self._benches.pop(release, None)
                if bench is None:
                    self._make_room()
                    bench = self._new(tree)
                # The dictionary is in the order of last use.
                self._benches[release] = bench
            bench.busy.acquire()
            with self._guard:
                if self._benches.get(release) is bench:
                    return bench
            bench.busy.release()

    def _new(self, like: Tree) -> "_Bench":
        if self._scratch is None:
            files = len(self._store.git.files(like.tree_id))
            self._scratch = self._stack.enter_context(self._cache.scratch(files=files))
        self._count += 1
        work = self._scratch / str(self._count)
        if self._free_trees:
            # Releases share most files, and a tree has thousands.
            tree = self._free_trees.pop()
        else:
            place = self._scratch / f"tree-{self._count}"
            tree = MovingTree(self._store, place / "files", place / "index")
        work.mkdir(parents=True)
        env = base_environment(work)
        mypy = WarmMypy(self._runner, self._cache, tree.folder, work, env, TIMEOUT)
        return _Bench(work, tree, mypy)

    def _make_room(self) -> None:
        """Close the benches used least recently; the next one gets their trees."""
        for name, bench in list(self._benches.items()):
            if len(self._benches) < _RELEASES_KEPT:
                return
            if not bench.busy.locked():
                del self._benches[name]
                bench.close()
                self._free_trees.append(bench.tree)


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


def lint(
    runner: Runner, cache: Cache, store: Store, before: Tree, after: Tree
) -> LintResult:
    """Lint once, as `Linter.lint`."""
    with contextlib.closing(Linter(runner, cache, store)) as linter:
        return linter.lint(before, after)


def new_findings(
    before: Sequence[LintFinding], after: Sequence[LintFinding]
) -> tuple[LintFinding, ...]:
    """The findings of `after` that `before` does not have.

    A complaint that moved with its line is not new. Nor is a complaint on an edited
    line, if one of the same kind vanished from the same file.
    """
    unmatched = Counter(finding.key for finding in before)
    candidates = []
    for finding in after:
        if unmatched[finding.key]:
            unmatched[finding.key] -= 1
        else:
            candidates.append(finding)
    vanished: Counter[tuple[str, str, str]] = Counter()
    for key, count in unmatched.items():
        vanished[key[:3]] += count
    new = []
    for finding in candidates:
        if vanished[finding.kind]:
            vanished[finding.kind] -= 1
        else:
            new.append(finding)
    return tuple(new)
