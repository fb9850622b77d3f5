# SPDX-License-Identifier: Apache-2.0
"""Where a step can stand: on the base alone, or after which earlier steps.

A step needs an earlier one if it does not merge onto the base without it, if it names a
module that the earlier one adds, or if its own test is not red before and green after
without it. The smallest such set is looked for, and the step is tested on it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from xpustack.base.store import Store
from xpustack.builds.build import build, build_version
from xpustack.builds.installed import Build
from xpustack.checks.results import Result, stored_pass, test_result
from xpustack.core.cache import Cache
from xpustack.core.process import Runner
from xpustack.core.project import Project
from xpustack.forks.server import Server
from xpustack.refresh.carry import CarriedStep, carrier, carry_step
from xpustack.series.overlay import KERNEL_HOME, overlay_files
from xpustack.series.tree import BaseTree, Series, StepTree, Tree
from xpustack.steptest.material import Support
from xpustack.steptest.step_test import StepTest

NO_TIP = -1
"""The number of steps of a tip: no branch is one."""
_NEAR = 8
"""The nearest earlier steps that a test may need before all of them are tried."""
_WITHOUT = "its test passes without it"
State = Literal["stands", "upstream", "conflict", "waits", "fails"]


@dataclass(frozen=True)
class Standing:
    """Where a step stands.

    Attributes:
        state: `stands` with a tested tree; `upstream` has the change; `conflict` with
            the base; `waits` for a step that does not stand; `fails` its own test
            wherever it was put.
        needs: the earlier steps that it needs, oldest first.
        series: the base, those steps and the step; None if it does not stand.
        test: its own test, red on the tree before and green on its tree.
        evidence: why it does not stand, or why upstream has it.
    """

    step: StepTree
    state: State
    needs: tuple[str, ...] = ()
    series: Series | None = None
    test: Result | None = None
    evidence: str = ""

    @property
    def slug(self) -> str:
        return self.step.slug

    @property
    def text(self) -> str:
        """Such as `alone`, or `after merge-once`."""
        if self.state == "stands":
            return f"after {', '.join(self.needs)}" if self.needs else "alone"
        return self.state


@dataclass
class Standings:
    """Finds where the steps of a series stand on a base, which may be another one.

    Args:
        source: the series, whole.
        base: where the steps are to stand.
    """

    project: Project
    cache: Cache
    source: Series
    base: BaseTree
    runner: Runner
    server: Server
    _found: dict[str, Standing] = field(default_factory=dict)
    _stacks: dict[tuple[str, ...], "Tree | CarriedStep"] = field(default_factory=dict)
    _varied: set[str] = field(default_factory=set)
    _tests: dict[str, Result] = field(default_factory=dict)

    def take(self, slug: str, needs: tuple[str, ...]) -> None:
        """Take a step as standing on some earlier ones, where it was tested before."""
        self._found[slug] = Standing(self._steps[slug], "stands", needs)

    def of(self, slug: str, along: Iterable[str] = ()) -> Standing:
        """Where a step stands.

        Args:
            along: earlier steps that it takes along whether it needs them or not.
        """
        if slug not in self._found:
            self._found[slug] = self._find(self._steps[slug], tuple(along))
        return self._found[slug]

    def together(self) -> Series | None:
        """All steps that were found to stand, on one another in the order of the
        series; None if they do not merge so."""
        slugs = self._closure(self._found)
        if not slugs:
            return None
        end = self._stack(slugs[:-1], self._steps[slugs[-1]])
        if isinstance(end, CarriedStep):
            return None
        return Series(self.base, tuple(reversed(end.applied)))

    @property
    def _steps(self) -> dict[str, StepTree]:
        return {tree.slug: tree for tree in self.source.steps}

    def _find(self, step: StepTree, along: tuple[str, ...]) -> Standing:
        self.cache.progress(f"looking where {step.slug} can stand")
        named = [*along, *self._named(step)]
        missing = [
            slug for slug in named if self.of(slug).state not in ("stands", "upstream")
        ]
        if missing:
            return Standing(step, "waits", evidence=f"for {', '.join(missing)}")
        needs = self._closure(named)
        while isinstance(end := self._stack(needs, step), CarriedStep):
            if end.verdict == "upstream":
                return Standing(step, "upstream", evidence=end.evidence)
            clashing = {clash.path for clash in end.clashes}
            more = self._sharing(step, clashing, needs)
            standing = [slug for slug in more if self.of(slug).state == "stands"]
            if standing:
                needs = self._closure([*needs, *standing])
            elif step.slug not in self._varied:
                self._varied.add(step.slug)
                self._stacks.pop((*needs, step.slug), None)
            elif self._passes_on(self._tree(self._closure(named)), step):
                return Standing(step, "upstream", evidence=_WITHOUT)
            elif more:
                return Standing(step, "waits", evidence=f"for {', '.join(more)}")
            else:
                places = ", ".join(sorted(clashing))
                return Standing(step, "conflict", evidence=f"in {places}")
        needs = self._shrunk(named, needs, lambda some: self._merges(some, step))
        return self._tested(step, named, needs)

    def _tested(
        self, step: StepTree, named: Sequence[str], needs: tuple[str, ...]
    ) -> Standing:
        """The standing on the smallest set, `needs` or more, on which the step's own
        test is red before and green after."""
        first = self._test(needs, step)
        if first.status == "passed":
            return self._standing(step, needs, first)
        if self._passes_on(self._tree(needs), step):
            return Standing(step, "upstream", evidence=_WITHOUT)
        sharing = self._sharing(step, set(step.changed), needs)
        everything = [tree.slug for tree in step.parent.applied]
        for wider in (sharing, [*sharing, *everything[-_NEAR:]], everything):
            more = self._closure([*needs, *wider])
            if more == needs or not self._passes(more, step):
                continue
            more = self._shrunk(needs, more, lambda some: self._passes(some, step))
            return self._standing(step, more, self._test(more, step))
        return Standing(step, "fails", needs, evidence="; ".join(first.detail[:1]))

    def _standing(
        self, step: StepTree, needs: tuple[str, ...], test: Result
    ) -> Standing:
        end = self._stack(needs, step)
        assert isinstance(end, StepTree), "it was tested"
        series = Series(self.base, tuple(reversed(end.applied)))
        present = tuple(tree.slug for tree in series.steps[:-1])
        return Standing(step, "stands", present, series, test)

    # Sets of steps.

    def _closure(self, slugs: Iterable[str]) -> tuple[str, ...]:
        """Those of the steps that stand, and what they need themselves, in the order of
        the series."""
        wanted: set[str] = set()
        for slug in slugs:
            standing = self.of(slug)
            if standing.state == "stands":
                wanted |= {slug, *standing.needs}
        return tuple(slug for slug in self._steps if slug in wanted)

    def _named(self, step: StepTree) -> Iterator[str]:
        """The earlier steps whose new modules the step's own lines or new files name. A
        kernel is brought by every step that needs it."""
        lines = step.step.diff.decode("utf-8", "replace").splitlines()
        text = "\n".join(line for line in lines if line.startswith("+"))
        for file in overlay_files(self.project, step.step).values():
            text += file.content.decode("utf-8", "replace")
        for earlier in step.parent.applied:
            modules = (
                path.removesuffix(".py").replace("/", ".")
                for path in earlier.added
                if path.startswith("vllm/") and not path.endswith("/__init__.py")
                if not path.startswith(KERNEL_HOME + "/")
            )
            if any(module in text for module in modules):
                yield earlier.slug

    def _sharing(
        self, step: StepTree, paths: set[str], without: Sequence[str]
    ) -> list[str]:
        """The earlier steps that change one of `paths`."""
        return [
            earlier.slug
            for earlier in step.parent.applied
            if paths & set(earlier.changed)
            if earlier.slug not in without
            if self.of(earlier.slug).state != "upstream"
        ]

    def _shrunk(
        self,
        kept: Sequence[str],
        needs: tuple[str, ...],
        works: Callable[[tuple[str, ...]], bool],
    ) -> tuple[str, ...]:
        """A part of `needs` with `kept` that works and from which no step can be taken
        with those that need it. Halves are tried first, and the newest."""
        least = self._closure(kept)
        size = len(needs)
        while extra := [slug for slug in reversed(needs) if slug not in least]:
            size = min(size, len(extra))
            for start in range(0, len(extra), size):
                gone = set(extra[start : start + size])
                rest = [
                    slug for slug in extra if not gone & {slug, *self.of(slug).needs}
                ]
                if works(fewer := self._closure([*kept, *rest])):
                    needs = fewer
                    break
            else:
                if size == 1:
                    break
                size //= 2
        return needs

    # Trees and tests.

    def _stack(self, needs: Sequence[str], step: StepTree) -> "Tree | CarriedStep":
        """The tree of a step after some earlier ones, or why there is none."""
        end: Tree | CarriedStep = self.base
        slugs = (*needs, step.slug)
        for number, slug in enumerate(slugs, start=1):
            assert not isinstance(end, CarriedStep)
            key = slugs[:number]
            if key not in self._stacks:
                self._stacks[key] = self._put(self._steps[slug], end)
            end = self._stacks[key]
            if isinstance(end, CarriedStep):
                break
        return end

    def _put(self, step: StepTree, parent: Tree) -> "Tree | CarriedStep":
        """A step on the tree `parent`."""
        store = Store(self.cache)
        old, new = self.source.base.commit, self.base.commit
        with store.writing() as writer, self.cache.scratch() as scratch:
            carry = carrier(writer.directory, scratch, old, new)
            variants = step.slug in self._varied
            carried = carry_step(
                self.project, carry, step, parent.commit, variants=variants
            )
            if carried.tree is None or carried.verdict == "upstream":
                return carried
            commit = carry.commit(carried.form, carried.tree, parent.commit)
            changes = writer.changes(parent.tree_id, carried.tree)
        changed = tuple(sorted(change.path for change in changes))
        added = tuple(sorted(change.path for change in changes if change.old is None))
        return StepTree(carried.form, commit, carried.tree, parent, changed, added)

    def _merges(self, needs: Sequence[str], step: StepTree) -> bool:
        return isinstance(self._stack(needs, step), StepTree)

    def _passes(self, needs: Sequence[str], step: StepTree) -> bool:
        return self._merges(needs, step) and self._test(needs, step).status == "passed"

    def _tree(self, needs: Sequence[str]) -> Tree:
        """The tree with some steps, which are known to merge."""
        tree: Tree | CarriedStep = self.base
        if needs:
            tree = self._stack(needs[:-1], self._steps[needs[-1]])
        assert not isinstance(tree, CarriedStep)
        return tree

    def _passes_on(self, tree: Tree, step: StepTree) -> bool:
        """Whether the step's test passes on a tree without it."""
        support, release = Support.of(self.project), self.base.release
        test = StepTest.of(support, release, step.step, None, self._built(tree))
        return not test.run(self.server, self.cache).problems

    def _test(self, needs: Sequence[str], step: StepTree) -> Result:
        """The step's own test, before and after, on a tree with `needs` alone."""
        after = self._stack(needs, step)
        assert isinstance(after, StepTree)
        support, release = Support.of(self.project), self.base.release
        builds = [self._built(tree) for tree in (after.parent, after)]
        test = StepTest.of(support, release, step.step, *builds)
        key = test.key
        stored = self.cache.results_get(key)
        known = stored_pass(stored, "test", step.step.release, step.slug)
        known = known or self._tests.get(key)
        if known is not None:
            return known
        among = f"after {', '.join(needs)}" if needs else "alone"
        self.cache.progress(f"testing {step.slug} {among}")
        report = test.run(self.server, self.cache)
        result = test_result(step.step.release, step.slug, report, False)
        self._tests[key] = result
        if result.status == "passed":
            self.cache.results_put(key, msgspec.to_builtins(result))
        return result

    def _built(self, tree: Tree) -> Build:
        version = build_version(tree, NO_TIP)
        return build(self.runner, Store(self.cache), tree, version)
