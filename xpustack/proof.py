# SPDX-License-Identifier: Apache-2.0
"""What the checks have proven of a series, looked up without doing anything."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xpustack import build, lint, steptest
from xpustack.build import Build, version_of
from xpustack.cache import Cache
from xpustack.project import Project
from xpustack.results import Result
from xpustack.series import Step
from xpustack.steptest import Material
from xpustack.tree import Tree


@dataclass(frozen=True)
class Proof:
    """The last green checks of one step as it is now, None where there are none.

    `built` says that both of its trees are built; `when` is the time of the oldest
    of its results in seconds since 1970.
    """

    step: Step
    built: bool
    lint: Result | None
    test: Result | None
    when: float | None

    @property
    def missing(self) -> tuple[str, ...]:
        """The kinds of check that are not proven."""
        kinds = (("build", self.built), ("lint", self.lint), ("test", self.test))
        return tuple(kind for kind, proven in kinds if not proven)


def linted_key(before: Tree, after: Tree) -> str:
    """Where the cache keeps the lint result of one tree over another."""
    return f"lint-{lint.key_of(before, after)}"


def tested_key(step: Step, stuff: Material, before: Build | None, after: Build) -> str:
    """Where the cache keeps the test result of a step."""
    return f"test-{steptest.key_of(step, stuff, before, after)}"


def proofs(project: Project, cache: Cache, made: Sequence[Tree]) -> list[Proof]:
    """What is proven of each step of a series, by its trees, base first.

    Raises:
        SeriesError: a step names no test module, or one that does not exist.
    """
    last = len(made) - 1
    builds = [_build(cache, tree, last) for tree in made]
    found = []
    for before, after in itertools.pairwise(made):
        assert after.step is not None
        old, new = builds[before.index], builds[after.index]
        stuff = steptest.material(project, after.step)
        keys = (linted_key(before, after), tested_key(after.step, stuff, old, new))
        linted, tested = (_result(cache, key) for key in keys)
        times = [time for key in keys if (time := cache.results_time(key)) is not None]
        found.append(
            Proof(
                after.step,
                old.wheel.is_file() and new.wheel.is_file(),
                linted,
                tested,
                min(times, default=None),
            )
        )
    return found


def result_keys(project: Project, cache: Cache, made: Sequence[Tree]) -> frozenset[str]:
    """Where the cache keeps every result of a series as it is now, step by step and
    at its tip, by its trees, base first.

    Raises:
        SeriesError: a step names no test module, or one that does not exist.
    """
    last = len(made) - 1
    builds = [_build(cache, tree, last) for tree in made]
    keys = {linted_key(made[0], made[-1])} if last else set()
    for before, after in itertools.pairwise(made):
        assert after.step is not None
        stuff = steptest.material(project, after.step)
        pairs = ((builds[before.index], builds[after.index]), (None, builds[-1]))
        keys |= {tested_key(after.step, stuff, old, new) for old, new in pairs}
        keys.add(linted_key(before, after))
    return frozenset(keys)


def _build(cache: Cache, tree: Tree, last: int) -> Build:
    """The build of a tree as it would be; `wheel` need not exist."""
    version = version_of(tree, last)
    key = build.key_of(tree, version)
    home = cache.wheels / key
    wheel = next(home.glob("*.whl"), home / "none.whl")
    return Build(key, version, wheel, Path(home, "site"), 0.0, cached=True)


def _result(cache: Cache, key: str) -> Result | None:
    known = cache.results_get(key)
    if known is None:
        return None
    try:
        result = msgspec.convert(known, Result)
    except msgspec.ValidationError:
        return None
    return result if result.status == "passed" else None
