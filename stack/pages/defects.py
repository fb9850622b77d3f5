# SPDX-License-Identifier: Apache-2.0
"""Defects of upstream by release: what a step's tests observe before and after it."""

import re
from collections.abc import Iterable

import msgspec
from msgspec.structs import asdict

from stack.base.releases import load
from stack.checks.checker import Checker, Proof
from stack.core.cache import Cache
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import record
from stack.pages.made import TREE, UNKNOWN, stamp
from stack.series.apply import trees
from stack.series.result import Figure

LIST = "tests/steps/defects.toml"
PAGE = "docs/defects.md"
DATA = "docs/data/defects.csv"
SECTION = "defects"
"""The page's generated section."""
UNPROVEN = "not checked where this was written"
_LONGEST = 160
"""Characters of a failure that the page shows."""
_BY_STEP = re.compile(r"\bby `([a-z0-9-]+)`$")
"""Another step of the series, in the reason why a series lacks a step."""


class Defect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A defect of the list.

    Attributes:
        what: the defect in a few words.
        step: the slug of the step that fixes it.
        tests: a regular expression of the names of the tests that show it.
        elsewhere: by release, why its series has no such step.
    """

    id: str
    what: str
    step: str
    tests: str = "."
    elsewhere: dict[str, str] = {}


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defect: tuple[Defect, ...]


class Observation(msgspec.Struct, frozen=True):
    """What the tests observe of a defect in a release, before the step and after it: a
    row of the record. `step` is empty where the release has no such step."""

    id: str
    defect: str
    release: str
    before: str
    after: str
    step: str


def defects(project: Project) -> tuple[Defect, ...]:
    """The list of this repository.

    Raises:
        UsageError: the list does not fit its schema.
    """
    path = project.root / LIST
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_List).defect
    except msgspec.DecodeError as error:
        raise UsageError(str(error), path=LIST) from error


def verdict(defect: Defect, release: str, has: set[tuple[str, str]]) -> str:
    """Whether a patched release has a defect, from the pairs of release and step."""
    reason = defect.elsewhere.get(release)
    if reason is None:
        return "fixed" if (release, defect.step) in has else "broken, without a reason"
    if reason.startswith("not fixed"):
        return "broken"
    other = _BY_STEP.search(reason)
    return "fixed" if other and (release, other[1]) in has else "absent"


def fixed(
    listed: Iterable[Defect], release: str, has: set[tuple[str, str]]
) -> set[str]:
    """The numbers of the defects that a patched release no longer has. A defect with
    several steps has several entries and one number."""
    return {one.id for one in listed if verdict(one, release, has) == "fixed"}


def observations(project: Project, cache: Cache) -> list[Observation]:
    """Each defect, in the order of the list, in each release, oldest first, from the
    results that `check` left in the cache."""
    checker, pinned = Checker(project, cache), load(project)
    proofs = {
        (release.name, proof.step.slug): proof
        for release in pinned
        for proof in checker.proofs(trees(checker.store, project, release))
    }
    return [
        _observation(defect, name, proofs.get((name, defect.step)))
        for defect in defects(project)
        for name in pinned.names
    ]


def _observation(defect: Defect, release: str, proof: Proof | None) -> Observation:
    """What the tests of a step observed; `proof` is None where there is no step."""
    if proof is None or release in defect.elsewhere:
        why = defect.elsewhere.get(release, "no such step")
        return Observation(defect.id, defect.what, release, why, "", "")
    figures = [
        figure
        for figure in (proof.test.figures if proof.test is not None else ())
        if re.search(defect.tests, figure.test)
    ]
    before = _joined((figure.test, _shortened(figure)) for figure in figures)
    after = _joined((figure.test, figure.after) for figure in figures if figure.after)
    return Observation(
        defect.id,
        defect.what,
        release,
        before or UNPROVEN,
        after or ("the tests pass" if figures else UNPROVEN),
        defect.step,
    )


def _joined(messages: Iterable[tuple[str, str]]) -> str:
    """The messages of tests, each with the test's parameters, without repetition."""
    texts = []
    for test, message in messages:
        parameters = test.partition("[")[2]
        texts.append(f"[{parameters} {message}" if parameters else message)
    return "; ".join(dict.fromkeys(texts))


def _shortened(figure: Figure) -> str:
    """The failure without the words of Python around it."""
    text = figure.before.removeprefix("AssertionError: ").partition("\nassert ")[0]
    return text if len(text) < _LONGEST else f"{text[: _LONGEST - 4]} ..."


def write(project: Project, observed: Iterable[Observation]) -> None:
    """Write the record, and the page's generated section. A step whose present form was
    not checked here keeps the figures, tree and day of its earlier check, which the
    record has; a release without any figure has no row.

    Raises:
        UsageError: the page has no such section.
    """
    earlier = {
        (row["id"], row["defect"], row["release"]): row
        for row in read_rows(project.root / DATA)
    }
    rows, kept = [], []
    for row in observed:
        old = earlier.get((row.id, row.defect, row.release), {})
        if row.after == UNPROVEN and old.get("step") == row.step:
            kept.append(row.release)
            rows.append(old)
        else:
            unproven = {TREE: UNKNOWN} if row.after == UNPROVEN else {}
            rows.append(asdict(row) | stamp(project, row.release) | unproven)
    checked = {row["release"] for row in rows if row["after"] not in ("", UNPROVEN)}
    unchecked = [row["release"] for row in rows if row["release"] not in checked]
    section = "\n\n".join(
        f"{says}: {', '.join(dict.fromkeys(names))}."
        for says, names in (
            ("With figures of a check before the steps' last change", kept),
            ("Not checked step by step where this was written", unchecked),
        )
        if names
    )
    figures = [row for row in rows if row["release"] in checked]
    record.write(project, DATA, figures, PAGE, (SECTION, section))
