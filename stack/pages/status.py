# SPDX-License-Identifier: Apache-2.0
"""The matrix release by step: how large each step is, and its status upstream; and the
pages that are made of it."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from stack.base.releases import Release, Releases
from stack.base.store import base_ref
from stack.checks.checker import Checker
from stack.core import markdown
from stack.core.cache import Cache
from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages.made import TABLES, ages, ages_table
from stack.series.apply import trees_before_failure
from stack.series.overlay import overlay_files
from stack.series.patch import load_series
from stack.series.result import KINDS
from stack.series.static import changed_lines, new_file_lines

README = "README.md"
STEPS = "docs/steps.md"
FIGURES = "docs/e2e.md"
DATA = "docs/data/steps.csv"
SECTION = "status"
"""The README's generated section: one row for each release."""
PARTS_SECTION = "steps"
"""The generated section of `docs/steps.md`: one row for each part of a layer."""

AGES_SECTION = "trees"
"""The generated section of `docs/e2e.md`: which tree gave which rows."""

PARTS = Path(__file__).with_name("parts.toml")
ELSEWHERE = "Elsewhere"


class StepStatus(msgspec.Struct, frozen=True):
    """The size, status and checks of one step of one release.

    Attributes:
        changed: lines that its patch adds and removes.
        brought: lines of the overlay files and kernels that it adds.
        upstream: its `Upstream-Status`.
        removal: the condition under which it is dropped.
        checks: `green`, or what is not proven of the step as it is now; None where
            this machine does not have the release.
    """

    release: str
    step: str
    subject: str
    changed: int
    brought: int
    upstream: str
    removal: str = ""
    checks: str | None = None


def step_statuses(project: Project, releases: Releases) -> list[StepStatus]:
    """Every step of every release, oldest release first, in the series' order.

    Raises:
        SeriesError: a series cannot be read.
    """
    return [
        StepStatus(
            release=release.name,
            step=step.slug,
            subject=step.subject,
            changed=changed_lines(step),
            brought=new_file_lines(overlay_files(project, step)),
            upstream=step.trailers.upstream_status,
            removal=step.trailers.removal,
        )
        for release in releases
        for step in load_series(project, release.name)
    ]


def checked_statuses(
    project: Project, cache: Cache, releases: Releases
) -> list[StepStatus]:
    """As `step_statuses`, with the checks from the cache.

    Nothing is downloaded, applied or run.

    Raises:
        SeriesError: a series cannot be read.
    """
    checker = Checker(project, dataclasses.replace(cache, offline=True))
    refs = checker.store.commits(base_ref(release) for release in releases)
    checks = {
        (release.name, slug): word
        for release in releases
        if base_ref(release) in refs
        for slug, word in _checks(checker, release).items()
    }
    return [
        msgspec.structs.replace(
            status, checks=checks.get((status.release, status.step))
        )
        for status in step_statuses(project, releases)
    ]


def _checks(checker: Checker, release: Release) -> dict[str, str]:
    """What is proven of each step, in a few words."""
    series = trees_before_failure(checker.store, checker.project, release)
    proofs = checker.proofs(series)
    words = {proof.step.slug: _proven(proof.missing) for proof in proofs}
    if series.problem is not None and series.problem.step is not None:
        words[series.problem.step] = "does not apply"
    return words


def _proven(missing: Sequence[str]) -> str:
    if len(missing) == len(KINDS):
        return "not checked here"
    return f"{' and '.join(missing)} not green" if missing else "green"


def cell(status: StepStatus) -> str:
    """A step in the matrix, such as `green, 120 lines + 30 new, Pending`."""
    size = f"{status.changed} lines"
    if status.brought:
        size += f" + {status.brought} new"
    return f"{status.checks or 'unknown'}, {size}, {status.upstream}"


def matrix(
    statuses: Iterable[StepStatus], names: Sequence[str]
) -> list[tuple[str, list[StepStatus | None]]]:
    """Rows of slugs, columns of releases. Slugs keep the order of the series: one
    comes before another if the first release that has both says so."""
    columns: dict[str, dict[str, StepStatus]] = {name: {} for name in names}
    order: list[str] = []
    for status in statuses:
        columns[status.release][status.step] = status
    for steps in columns.values():
        place = 0
        for slug in steps:
            if slug in order:
                place = max(place, order.index(slug) + 1)
            else:
                order.insert(place, slug)
                place += 1
    return [(slug, [columns[name].get(slug) for name in names]) for slug in order]


def steps_rows(statuses: Sequence[StepStatus], names: Sequence[str]) -> str:
    """The text of `docs/data/steps.csv`: a row for each step and release, steps in the
    matrix's order."""
    return csv_text(
        [
            {
                "step": slug,
                "release": status.release,
                "subject": status.subject,
                "lines": status.changed,
                "new": status.brought,
                "upstream": status.upstream,
                "dropped when": status.removal,
            }
            for slug, row in matrix(statuses, names)
            for status in row
            if status is not None
        ]
    )


class _Part(msgspec.Struct, frozen=True):
    name: str
    does: str
    steps: tuple[str, ...]


def layer_steps(slugs: Iterable[str]) -> list[tuple[str, str, list[str]]]:
    """Each part of a layer with what it does and those of its steps that any series
    has. A step that no part names is in a part of its own, at the end."""
    known = list(dict.fromkeys(slugs))
    listed = msgspec.toml.decode(PARTS.read_bytes(), type=dict[str, list[_Part]])
    named = [slug for part in listed["part"] for slug in part.steps]
    other = tuple(slug for slug in known if slug not in named)
    elsewhere = _Part(ELSEWHERE, "switches, pages, what is refused", other)
    return [
        (part.name, part.does, [slug for slug in part.steps if slug in known])
        for part in (*listed["part"], *([elsewhere] if other else []))
    ]


def parts_table(statuses: Iterable[StepStatus]) -> str:
    """Each part of a decoder layer and the steps that change it, as Markdown."""
    rows = (
        (name, does, ", ".join(f"`{slug}`" for slug in slugs))
        for name, does, slugs in layer_steps(status.step for status in statuses)
        if slugs
    )
    return markdown.table(("part", "what it does", "steps"), rows)


def pages(project: Project, releases: Releases, overview: str) -> dict[Path, str]:
    """What the README, and the rows and the page of all steps, are to say.

    Args:
        overview: the content of the README's section.

    Raises:
        UsageError: one of the pages lacks its section.
    """
    statuses = step_statuses(project, releases)
    readme, page = project.root / README, project.root / STEPS
    made = {}
    if (project.root / TABLES).is_file():
        figures = project.root / FIGURES
        shown = ages_table(ages(project))
        made[figures] = markdown.with_section(figures, AGES_SECTION, shown)
    return {
        **made,
        readme: markdown.with_section(readme, SECTION, overview),
        page: markdown.with_section(page, PARTS_SECTION, parts_table(statuses)),
        project.root / DATA: steps_rows(statuses, releases.names),
    }
