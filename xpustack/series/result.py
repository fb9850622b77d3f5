# SPDX-License-Identifier: Apache-2.0
"""What a check found of one step, or of one tree."""

from typing import Literal

import msgspec

from xpustack.core.errors import command

Kind = Literal["static", "apply", "build", "lint", "test"]
Status = Literal["passed", "failed", "blocked"]
KINDS: tuple[Kind, ...] = ("build", "lint", "test")
COPIED = "copied"
"""The `step` of the comparison of a copied tree with a real build."""


class Figure(msgspec.Struct, frozen=True):
    """A test's failure on the tree before a step, and its figure on the tree after."""

    test: str
    before: str
    after: str


class Result(msgspec.Struct, frozen=True):
    """One check of one step.

    Attributes:
        step: a slug, or `base`, `tip`, `copied` or `-` (the whole release).
        status: `blocked` if it did not run because what it needs failed.
        seconds: wall time of the work, when it was done.
        cached: whether the result was stored before.
        summary: what a row or a failure's first line says.
        detail: the last lines of the output.
        tip: whether a test ran on the tip alone.
        typed: whether a lint ran mypy.
        figures: what a test measured.
        sourceless: whether the release's archive cannot be had.
    """

    release: str
    step: str
    kind: Kind
    status: Status
    seconds: float = 0.0
    cached: bool = False
    summary: str = ""
    detail: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tip: bool = False
    typed: bool = False
    figures: tuple[Figure, ...] = ()
    sourceless: bool = False

    @property
    def command(self) -> str:
        """The command that runs this one check by hand."""
        words = ["python", "-m", "xpustack"]
        if self.kind == "static":
            return command(*words, "check", "--static")
        if self.kind == "apply":
            return command(*words, "apply", self.release, "--to", "DIR")
        words += ["check", self.release]
        if self.step not in ("base", "tip", COPIED, "-"):
            words.append(self.step)
        if self.tip or self.step == "tip":
            words.append("--tip")
        return command(*words, "--only", self.kind)
