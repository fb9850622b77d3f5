# SPDX-License-Identifier: Apache-2.0
"""Lint what a step touches with the base's own linters, before and after it."""

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from stack.base import releases
from stack.base.store import Store
from stack.core import fingerprint
from stack.core.checkout import Checkout
from stack.core.process import Runner
from stack.core.project import Project
from stack.forks.server import Server
from stack.lint import mypy_daemon
from stack.lint.hook_configuration import read_hooks
from stack.lint.hook_runner import HookRunner, LintFinding
from stack.series.result import Result
from stack.series.tree import Series, Tree

_PRELOADED = ("argparse", "ast", "dataclasses", "pathlib", "regex", "subprocess")
"""What the bases' hooks have in common."""
_SHOWN = 20
"""The most findings that a result names."""


def lint_key(before: Tree, after: Tree, *, types: bool) -> str:
    """Where the cache keeps the lint result of one tree over another, with mypy or
    without."""
    key = fingerprint.digest(
        before=before.tree_id,
        after=after.tree_id,
        types=str(types),
        tool=fingerprint.tool("lint.linter"),
        environment=fingerprint.lock(),
    )
    return f"lint-{key}"


def steps_are_typed(project: Project, series: Series) -> bool:
    """Whether mypy runs on each step of a series, not on its tip alone: on the newest
    release, from which the others' steps come, and where one step is all."""
    newest = releases.load(project).newest == series.base.release
    return newest or len(series.steps) == 1


class Linter:
    """Lints trees, one at a time, and reuses what earlier lints left: a checked-out
    tree that moves from one to the next, and mypy's cache beside it.

    Any number of threads may call it. `close` removes everything.
    """

    def __init__(self, runner: Runner, store: Store) -> None:
        self._runner, self._store = runner, store
        self._guard = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._server = self._stack.enter_context(closing(Server(runner, _PRELOADED)))
        self._place: Path | None = None

    def close(self) -> None:
        with self._guard:
            self._place = None
            self._stack.close()

    def lint(
        self,
        name: str,
        before: Tree,
        after: Tree,
        *,
        types: bool,
        daemon: bool = False,
    ) -> Result:
        """Lint the files in which the trees differ, and compare: where `after` is
        clean, nothing can be new, and `before` is not looked at.

        Args:
            before: the same tree with fewer steps.
            name: what the result is called.
            types: whether mypy runs, too.
            daemon: whether it is mypy's daemon, which stays until `close`. It starts
                more slowly, and is ten times as fast on each further tree of a release.

        Raises:
            EnvironmentProblem: ruff is not of the base's version, or a tool broke.
            SourceError: the base's lint configuration is not understood.
            Stopped: the runner was stopped.
        """
        later = [tree for tree in after.applied if tree.index > before.index]
        paths = sorted({path for tree in later for path in tree.changed})
        with self._guard:
            place, self._place = self._place or self._new(), None
            files, work = place / "files", place / "work"
            objects = self._store.cache.objects
            checkout = Checkout(objects, work_tree=files, index=place / "index")
            try:
                checkout.check_out(after.tree_id)
                hooks = read_hooks(files, after.release.name)
                runner = HookRunner(
                    self._runner, self._server, hooks, checkout, work, daemon
                )
                found = runner.findings(after.tree_id, paths, types)
                new: tuple[LintFinding, ...] = ()
                if found:
                    base = runner.findings(before.tree_id, paths, types)
                    new = new_findings(base, found)
            except BaseException:
                # The next lint gets a new place.
                mypy_daemon.end_all(work)
                raise
            self._place = place
        tools = ", ".join(runner.tools) or "no file to lint"
        return Result(
            after.release.name,
            name,
            "lint",
            "failed" if new else "passed",
            runner.seconds,
            summary=f"{len(new)} new, {len(found) - len(new)} of the base; {tools}",
            detail=tuple(map(str, new[:_SHOWN])),
            notes=hooks.notes,
            typed=types and hooks.mypy is not None,
        )

    def _new(self) -> Path:
        """A place for a checkout, and for what linters write."""
        place = self._stack.enter_context(self._store.cache.scratch(in_memory=True))
        for name in ("files", "work"):
            (place / name).mkdir()
        self._stack.callback(mypy_daemon.end_all, place / "work")
        return place


def new_findings(
    before: Sequence[LintFinding], after: Sequence[LintFinding]
) -> tuple[LintFinding, ...]:
    """The findings of `after` that `before` does not have.

    A complaint that moved with its line is not new. Nor is a complaint on an edited
    line, if one of the same kind vanished from the same file.
    """
    unmatched = Counter((finding.kind, finding.content) for finding in before)
    candidates = []
    for finding in after:
        if unmatched[finding.kind, finding.content]:
            unmatched[finding.kind, finding.content] -= 1
        else:
            candidates.append(finding)
    vanished = Counter(kind for kind, _ in unmatched.elements())
    new = []
    for finding in candidates:
        if vanished[finding.kind]:
            vanished[finding.kind] -= 1
        else:
            new.append(finding)
    return tuple(new)
