# SPDX-License-Identifier: Apache-2.0
"""Where a step can stand: on the base alone, or after which earlier steps.

A step needs an earlier one if it does not merge onto the base without it, if it names a
module that the earlier one adds, if its own test is not red before and green after
without it, or if its notes say so. The smallest such set is looked for, and the step is
tested on it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from stack.checks.checker import Checker
from stack.refresh.carry import CarriedStep, Carrier
from stack.series.overlay import overlay_files
from stack.series.result import Result
from stack.series.tree import BaseTree, Series, StepTree, Tree
from stack.steptest.material import material_of
from stack.upstream.form import is_kernel
from stack.upstream.standing import Standing

Slugs = tuple[str, ...]
NO_TIP = -1
"""The number of steps of a tip: no branch is one."""
_NEAR = 8
"""The nearest earlier steps that a test may need before all of them are tried."""
_WITHOUT = "its test passes without it"


@dataclass
class Standings:
    """Finds where the steps of a series stand on a base, which may be another one.

    Args:
        source: the series, whole.
        base: where the steps are to stand.
        recorded: the earlier steps that a person named for a step, which no search
            finds.
        known: what steps needed when they were looked for before. A step whose test is
            red and green there stands so; another is looked for anew.
    """

    checker: Checker
    source: Series
    base: BaseTree
    recorded: Mapping[str, Slugs] = field(default_factory=dict)
    known: Mapping[str, Slugs] = field(default_factory=dict)
    _found: dict[str, Standing] = field(default_factory=dict)
    _stacks: dict[Slugs, "Tree | CarriedStep"] = field(default_factory=dict)
    _varied: set[str] = field(default_factory=set)
    _tests: dict[str, Result] = field(default_factory=dict)

    def take(self, slug: str, needs: Slugs) -> None:
        """Take a step as standing on some earlier ones, where it was tested before."""
        self._found[slug] = Standing(self._steps[slug], "stands", needs)

    def of(self, slug: str) -> Standing:
        """Where a step stands."""
        if slug not in self._found:
            self._found[slug] = self._find(self._steps[slug])
        return self._found[slug]

    def branch(self, slug: str) -> StepTree | None:
        """The tree of a step that stands, after what it needs alone; None if that does
        not merge."""
        end = self._stack(self.of(slug).needs, self._steps[slug])
        return end if isinstance(end, StepTree) else None

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

    def _find(self, step: StepTree) -> Standing:
        self.checker.cache.progress(f"looking where {step.slug} can stand")
        named = [*self.recorded.get(step.slug, ()), *self._named(step)]
        missing = [
            slug for slug in named if self.of(slug).state not in ("stands", "upstream")
        ]
        if missing:
            return Standing(step, "waits", evidence=f"for {', '.join(missing)}")
        if (as_before := self._as_known(step, named)) is not None:
            return as_before
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
        merges = partial(self._merges, step=step)
        needs = fewest(named, needs, self._closure, merges)
        return self._tested(step, named, needs)

    def _as_known(self, step: StepTree, named: Sequence[str]) -> Standing | None:
        """The standing on what was found before; None if it does not stand so."""
        earlier = {tree.slug for tree in step.parent.applied}
        if step.slug not in self.known or not earlier.issuperset(self.known[step.slug]):
            return None
        needs = self._closure([*named, *self.known[step.slug]])
        if not self._merges(needs, step):
            return None
        green = self._test(needs, step).status == "passed"
        return self._standing(step, needs) if green else None

    def _tested(self, step: StepTree, named: Sequence[str], needs: Slugs) -> Standing:
        """The standing on the smallest set, `needs` or more, on which the step's own
        test is red before and green after."""
        first = self._test(needs, step)
        if first.status == "passed":
            return self._standing(step, needs)
        if self._passes_on(self._tree(needs), step):
            return Standing(step, "upstream", evidence=_WITHOUT)
        sharing = self._sharing(step, set(step.changed), needs)
        likely = [*sharing, *self._tried(step)]
        nearest = [tree.slug for tree in step.parent.applied]
        for wider in (sharing, likely, [*likely, *nearest[:_NEAR]], nearest):
            more = self._closure([*needs, *wider])
            if more == needs or not self._passes(more, step):
                continue
            for works in (self._green, self._passes):
                enough = partial(works, step=step)
                fewer = fewest(needs, more, self._closure, enough)
                if self._passes(fewer, step):
                    return self._standing(step, fewer)
        return Standing(step, "fails", needs, evidence="; ".join(first.detail[:1]))

    def _standing(self, step: StepTree, needs: Slugs) -> Standing:
        test = self._test(needs, step)
        end = self._stack(needs, step)
        assert isinstance(end, StepTree), "it was tested"
        series = Series(self.base, tuple(reversed(end.applied)))
        present = tuple(tree.slug for tree in series.steps[:-1])
        return Standing(step, "stands", present, series, test)

    # Sets of steps.

    def _closure(self, slugs: Iterable[str]) -> Slugs:
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
        for file in overlay_files(self.checker.project, step.step).values():
            text += file.content.decode("utf-8", "replace")
        for earlier in step.parent.applied:
            if any(module in text for module in _modules(earlier.added)):
                yield earlier.slug

    def _tried(self, step: StepTree) -> Iterator[str]:
        """The earlier steps that change a module which the step's test names."""
        material = material_of(self.checker.support, step.step)
        text = "".join(path.read_text("utf-8") for path in material.tests.values())
        for earlier in step.parent.applied:
            if any(module in text for module in _modules(earlier.changed)):
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
        store = self.checker.store
        old, new = self.source.base.commit, self.base.commit
        with store.writing() as writer, self.checker.cache.scratch() as scratch:
            project, directory = self.checker.project, writer.directory
            carry = Carrier(project, directory, scratch, old, new)
            variants = step.slug in self._varied
            carried = carry.carry(step, parent.commit, variants=variants)
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
        """Whether the step merges after `needs`, and its test is red before and green
        after."""
        return self._green(needs, step) and self._test(needs, step).status == "passed"

    def _green(self, needs: Sequence[str], step: StepTree) -> bool:
        """Whether the step merges after `needs`, and its test passes there: one run,
        where `_test` takes up to four."""
        end = self._stack(needs, step)
        return isinstance(end, StepTree) and self._passes_on(end, step)

    def _tree(self, needs: Sequence[str]) -> Tree:
        """The tree with some steps, which are known to merge."""
        tree: Tree | CarriedStep = self.base
        if needs:
            tree = self._stack(needs[:-1], self._steps[needs[-1]])
        assert not isinstance(tree, CarriedStep)
        return tree

    def _passes_on(self, tree: Tree, step: StepTree) -> bool:
        """Whether the step's test passes on a tree, whatever it does before."""
        among = f"on a tree of {len(tree.applied)} steps"
        return self._result(step, None, tree, among).status == "passed"

    def _test(self, needs: Sequence[str], step: StepTree) -> Result:
        """The step's own test, before and after, on a tree with `needs` alone."""
        after = self._stack(needs, step)
        assert isinstance(after, StepTree)
        among = f"after {', '.join(needs)}" if needs else "alone"
        return self._result(step, after.parent, after, among)

    def _result(
        self, step: StepTree, before: Tree | None, after: Tree, among: str
    ) -> Result:
        """A step's test on two trees, or on `after` alone; a kept result if there is
        one. A red one of `after` alone is kept under a key of its own, for a later
        search, where its tests ran: else the machine may be at fault."""
        name, cache = step.step.release, self.checker.cache
        test = self.checker.step_test(step.step, before, after, NO_TIP)
        red = f"red-{test.key}"
        known = self.checker.stored(test.key, "test", name, step.slug)
        known = known or self._tests.get(test.key)
        if known is None and (kept := cache.results_get(red)) is not None:
            known = Result(name, step.slug, "test", "failed", detail=(kept["problem"],))
        if known is not None:
            return known
        cache.progress(f"testing {step.slug} {among}")
        result = self.checker.test(step.step, before, after, NO_TIP)
        self._tests[test.key] = result
        ran = not result.summary.startswith("0 tests")
        if result.status != "passed" and before is None and ran:
            cache.results_put(red, {"problem": result.detail[0]})
        return result


def _modules(paths: Iterable[str]) -> Iterator[str]:
    """The modules of some files of vLLM, without packages and kernels."""
    for path in paths:
        module = path.startswith("vllm/") and path.endswith(".py")
        if module and not path.endswith("/__init__.py") and not is_kernel(path):
            yield path.removesuffix(".py").replace("/", ".")


def fewest(
    kept: Sequence[str],
    needs: Slugs,
    closure: Callable[[Iterable[str]], Slugs],
    works: Callable[[Slugs], bool],
) -> Slugs:
    """A part of `needs` with `kept` that works, and no more without any step of it.

    What a set cannot do without is not asked of again in a smaller one, nor is what it
    needs itself. The last steps are tried first, so that none is left that needs the
    one which is tried, and many at once.

    Args:
        needs: steps that work, in their order, with all that each needs.
        closure: some steps with all that they need, in their order.
    """
    untried = [tuple(reversed(needs))]
    while untried:
        least = closure(kept)
        part = [slug for slug in untried.pop() if slug in needs and slug not in least]
        if not part:
            continue
        if works(fewer := closure(slug for slug in needs if slug not in part)):
            needs = fewer
        elif len(part) == 1:
            kept = [*kept, *part]
        else:
            half = len(part) // 2
            untried += [tuple(part[half:]), tuple(part[:half])]
    return needs
