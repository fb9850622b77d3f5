# SPDX-License-Identifier: Apache-2.0
"""The steps of a release, and its trees: the base, and the base with the first k steps
of a series.

Each tree is a commit of the store.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from stack.base.releases import Release
from stack.core.errors import StackError
from stack.series.diff import FileDiff
from stack.series.order import BASE_ALONE

KERNEL_HOME = "vllm/model_executor/kernels/xpu_dsv4"
"""Where kernels lie in vLLM."""
PLUGIN_HOME = "vllm_xpu_dsv4"
"""Where this stack's plugin lies, beside vLLM."""
KEYS = {
    "Upstream-Status": "upstream_status",
    "Related": "related",
    "Removal": "removal",
    "Overlay": "overlay",
    "Kernels": "kernels",
    "Test": "test",
    "Fails-before": "fails_before",
}
"""The fields of `Trailers` by the keys of a mail's lines, in the order of these."""
_NOTHING_FAILS = re.compile(r"none \[(\S[^\]]*)\]")


@dataclass(frozen=True, kw_only=True)
class Trailers:
    """The trailers of a step, in the order in which they are written.

    `related` are the pull requests and issues that a reviewer would ask about, such
    as `vllm-project/vllm#45986`. `test` and `fails_before` are None where the trailer
    is missing. `fails_before` keeps its text; `failure` is the regular expression in
    it.
    """

    upstream_status: str = ""
    related: tuple[str, ...] = ()
    removal: str = ""
    overlay: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    test: str | None = None
    fails_before: str | None = None

    @property
    def failure(self) -> str | None:
        """The pattern that the test's failure on the tree before the step must match;
        None for `none [why]`, which only a step without a diff may have."""
        text = self.fails_before
        return None if text is None or _NOTHING_FAILS.fullmatch(text) else text

    @property
    def for_upstream(self) -> bool:
        """Whether the step is to be sent upstream."""
        return not self.upstream_status.startswith(("Inappropriate", "Backport"))

    @property
    def stays(self) -> bool:
        """Whether the step is this stack's alone."""
        return self.upstream_status.startswith("Inappropriate")

    def lines(self) -> list[str]:
        """The trailers as the mail has them."""
        lines = []
        for key, name in KEYS.items():
            value: str | tuple[str, ...] | None = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            lines += [f"{key}: {text}" for text in values if text]
        return lines


@dataclass(frozen=True)
class Step:
    """One change of the size of one upstream pull request.

    `path` is its patch, which other releases may share; `message` is the text between
    subject and trailers; `diff` starts with `diff --git` or is empty; `files` is the
    parsed diff.
    """

    release: str
    slug: str
    path: Path
    subject: str
    message: str
    trailers: Trailers
    diff: bytes
    files: tuple[FileDiff, ...] = ()

    @property
    def touched(self) -> tuple[str, ...]:
        """The files that the diff changes, in its order, without those that it adds."""
        return tuple(file.path for file in self.files)

    @property
    def text(self) -> str:
        """Subject, message and trailers, as a commit message has them."""
        parts = [self.subject, self.message, "\n".join(self.trailers.lines())]
        return "\n\n".join(part for part in parts if part) + "\n"

    @property
    def commit_message(self) -> str:
        """The text with a line for the slug, which is a patch's folder."""
        return f"{self.text}Step: {self.slug}\n"


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


Tree = BaseTree | StepTree


@dataclass(frozen=True)
class Series:
    """The trees of a release's series, or of its first steps: one per step, oldest
    first. `problem` says why there are no more, if a step does not apply."""

    base: BaseTree
    steps: tuple[StepTree, ...] = ()
    problem: StackError | None = None

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
        return replace(self, steps=(*self.steps, tree))
