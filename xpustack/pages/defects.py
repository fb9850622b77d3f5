# SPDX-License-Identifier: Apache-2.0
"""Defects of upstream by release: what a step's tests found before it and after it,
and how alike two releases' patches of one slug are."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xpustack.base.releases import load
from xpustack.base.store import Store
from xpustack.checks.proof import proofs
from xpustack.core.cache import Cache, atomic_file
from xpustack.core.errors import UsageError
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.series.apply import trees
from xpustack.series.patch import Step
from xpustack.steptest.verdict import Figure

LIST = "tests/steps/defects.toml"
PAGE = "docs/defects.md"
UNPROVEN = "not checked on this machine"


class Defect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the list. `tests` is a regular expression of test names; `elsewhere`
    says, by release, why its series has no such step."""

    id: str
    what: str
    step: str
    tests: str = "."
    elsewhere: dict[str, str] = {}


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defect: tuple[Defect, ...]


@dataclass(frozen=True)
class Row:
    """A defect in a release: what was found before the step, and after it."""

    defect: Defect
    release: str
    before: str
    after: str


@dataclass(frozen=True)
class Alike:
    """Changed lines of two patches of one slug: in both, and in one of them."""

    slug: str
    both: int
    first: int
    second: int


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


def rows(
    project: Project,
    cache: Cache,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> list[Row]:
    """Each defect, in the order of the list, in each release, oldest first, from the
    results that `check` left in the cache."""
    listed = defects(project)
    store = Store(cache)
    found = []
    for release in load(project):
        made = trees(store, project, release, offline=offline, progress=progress)
        known = {proof.step.slug: proof.test for proof in proofs(project, cache, made)}
        for defect in listed:
            if defect.step not in known:
                why = defect.elsewhere.get(release.name, "no such step")
                found.append(Row(defect, release.name, why, ""))
                continue
            result = known[defect.step]
            figures = result.figures if result is not None else ()
            picked = [one for one in figures if re.search(defect.tests, one.test)]
            before = _joined((one.test, _shortened(one)) for one in picked)
            after = _joined((one.test, one.after) for one in picked if one.after)
            found.append(
                Row(
                    defect,
                    release.name,
                    before or UNPROVEN,
                    after or ("the tests pass" if picked else UNPROVEN),
                )
            )
    found.sort(key=lambda row: listed.index(row.defect))
    return found


def _joined(said: Iterable[tuple[str, str]]) -> str:
    """What tests said, each with its parameters, the same words once."""
    texts = []
    for test, text in said:
        parameters = test.partition("[")[2]
        texts.append(f"[{parameters} {text}" if parameters else text)
    return "; ".join(dict.fromkeys(texts))


def _shortened(figure: Figure) -> str:
    """The failure without the words of Python around it."""
    text = figure.before.removeprefix("AssertionError: ").partition("\nassert ")[0]
    return text if len(text) < 160 else f"{text[:156]} ..."


def alike(first: Sequence[Step], second: Sequence[Step]) -> list[Alike]:
    """The slugs of both series, with the changed lines of their patches compared."""
    others = {step.slug: step for step in second}
    found = []
    for step in first:
        if step.slug in others:
            left, right = (_changed(one.diff) for one in (step, others[step.slug]))
            both = left & right
            counts = (both.total(), (left - both).total(), (right - both).total())
            found.append(Alike(step.slug, *counts))
    return found


def _changed(diff: bytes) -> Counter[bytes]:
    return Counter(
        line
        for line in diff.splitlines()
        if line[:1] in (b"+", b"-") and line[:3] not in (b"+++", b"---")
    )


def markdown(found: Sequence[Row], compared: Sequence[Alike], names: str) -> str:
    """Both as Markdown tables. Releases that have no figure here are named below."""
    figured = {row.release for row in found if row.after not in ("", UNPROVEN)}
    unknown = dict.fromkeys(row.release for row in found if row.release not in figured)
    lines = ["| defect | release | before the step | after it | step |"]
    lines.append("|---|---|---|---|---|")
    for row in found:
        if row.release in unknown:
            continue
        cells = (
            f"**{row.defect.id}** {row.defect.what}",
            row.release,
            row.before,
            row.after,
            f"`{row.defect.step}`" if row.after else "",
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    if unknown:
        lines += [
            "",
            f"Not checked step by step where this was written: {', '.join(unknown)}.",
        ]
    lines += ["", f"Changed lines of one slug in {names}:", ""]
    lines += ["| slug | in both | in the first only | in the second only |"]
    lines += ["|---|---|---|---|"]
    lines += [
        f"| `{one.slug}` | {one.both} | {one.first} | {one.second} |"
        for one in compared
    ]
    return "\n".join(lines)


def write(project: Project, section: str) -> Path:
    """Put `section` between the marks of the page, and return the page.

    Raises:
        UsageError: the page lacks its marks.
    """
    path = project.root / PAGE
    begin, end = "<!-- defects: begin -->\n", "\n<!-- defects: end -->"
    text = path.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise UsageError(f"{PAGE} lacks the marks of its table", path=PAGE)
    head, tail = text.partition(begin)[0], text.partition(end)[2]
    with atomic_file(path) as file:
        file.write(f"{head}{begin}{section}{end}{tail}".encode())
    return path
