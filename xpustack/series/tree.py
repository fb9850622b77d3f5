# SPDX-License-Identifier: Apache-2.0
"""The trees of a release: its base, and the base with the first k steps of a series.

Each is a commit of the store.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from xpustack.base.releases import Release
from xpustack.series.order import BASE_ALONE
from xpustack.series.patch import Step


@dataclass(frozen=True)
class BaseTree:
    """A release's base, without any step. `commit` and `tree_id` are git ids."""

    release: Release
    commit: str
    tree_id: str

    index: ClassVar[int] = 0
    slug: ClassVar[None] = None
    label: ClassVar[str] = BASE_ALONE
    applied: ClassVar[tuple["StepTree", ...]] = ()

    @property
    def base(self) -> "BaseTree":
        return self

    @property
    def name(self) -> str:
        """Such as `v0.22.1 base`."""
        return f"{self.release.name} {self.label}"


@dataclass(frozen=True)
class StepTree:
    """A base with the steps of a series up to and including `step`.

    `commit` and `tree_id` are git ids; `parent` is the tree before the step. `changed`
    lists, sorted, the files that the step patches or adds; `added` only the latter.
    """

    step: Step
    commit: str
    tree_id: str
    parent: "Tree" = field(repr=False)
    changed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def applied(self) -> tuple["StepTree", ...]:
        """The trees of all its steps, this one first and the oldest last."""
        return (self, *self.parent.applied)

    @property
    def base(self) -> BaseTree:
        return self.parent.base

    @property
    def release(self) -> Release:
        return self.base.release

    @property
    def index(self) -> int:
        """How many steps the tree has."""
        return self.parent.index + 1

    @property
    def slug(self) -> str:
        """The step's slug; of a base it is None."""
        return self.step.slug

    @property
    def label(self) -> str:
        """The step's slug; of a base it is `base`."""
        return self.step.slug

    @property
    def name(self) -> str:
        """Such as `v0.22.1 swa-rope`."""
        return f"{self.release.name} {self.label}"


Tree = BaseTree | StepTree


@dataclass(frozen=True)
class Series:
    """The trees of a release's series, or of its first steps: one per step, oldest
    first."""

    base: BaseTree
    steps: tuple[StepTree, ...] = ()

    @property
    def tip(self) -> Tree:
        """The tree with all of the steps."""
        return self.steps[-1] if self.steps else self.base

    @property
    def trees(self) -> tuple[Tree, ...]:
        """All trees, base first."""
        return (self.base, *self.steps)

    def followed_by(self, tree: StepTree) -> "Series":
        """The series with one more tree, whose parent is the tip."""
        return Series(self.base, (*self.steps, tree))
