# SPDX-License-Identifier: Apache-2.0
"""The matrix release by step: how large each step is and where upstream stands."""

import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from xpustack.base.releases import Release, Releases
from xpustack.base.store import Store, base_ref
from xpustack.checks.proof import proofs
from xpustack.core import history
from xpustack.core.cache import Cache, atomic_file
from xpustack.core.errors import UsageError
from xpustack.core.project import Project
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import SUFFIX
from xpustack.series.patch import load_series
from xpustack.series.static import changed_lines, new_file_lines

README = "README.md"
STEPS = "docs/steps.md"
BEGIN, END = "<!-- status -->", "<!-- /status -->"
_DAY = 86_400
_STEPS_HEAD = """\
# Every step of every release

What a step changes there, where upstream stands, and when the step is dropped. `lines`
are those that its patch adds and removes, `new` those of the files and kernels that it
brings. `python -m xpustack status --write-readme` writes this page.

"""
_SECTION = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)


class Entry(msgspec.Struct, frozen=True):
    """One step of one release. `changed` counts added and removed lines of its
    patch, `brought` the lines of the overlay files and kernels that it adds.
    `removal` is the condition under which it is dropped.

    `checks` is `green`, or what is not proven of the step as it is now; None where
    this machine does not have the release. `since` is the day on which its patch
    was first committed, as `2026-11-21`, and `age` the days since then; None while
    it is not committed.
    """

    release: str
    position: int
    step: str
    subject: str
    changed: int
    brought: int
    upstream: str
    removal: str = ""
    checks: str | None = None
    since: str | None = None
    age: int | None = None


def entries(project: Project, releases: Releases) -> list[Entry]:
    """Every step of every release, oldest release first, in the series' order.

    Raises:
        SeriesError: a series cannot be read.
    """
    found = []
    for release in releases:
        steps = load_series(project, release.name)
        for index, step in enumerate(steps):
            found.append(
                Entry(
                    release=release.name,
                    position=index + 1,
                    step=step.slug,
                    subject=step.subject,
                    changed=changed_lines(step),
                    brought=new_file_lines(project, steps[:index], step),
                    upstream=step.trailers.upstream_status,
                    removal=step.trailers.removal,
                )
            )
    return found


def judged(
    project: Project, cache: Cache, releases: Releases, now: float | None = None
) -> list[Entry]:
    """As `entries`, with what this machine knows: checks from the cache, age from
    git. Nothing is downloaded, applied or run.

    Args:
        now: seconds since 1970; None for the clock.

    Raises:
        SeriesError: a series cannot be read.
    """
    store = Store(cache)
    here = store.refs()
    proven = {
        (release.name, slug): word
        for release in releases
        if base_ref(release) in here
        for slug, word in _checks(project, cache, store, release).items()
    }
    born = history.addition_times(project, project.patches)
    today = int(now if now is not None else time.time()) // _DAY
    found = []
    for entry in entries(project, releases):
        path = project.series_dir(entry.release) / (entry.step + SUFFIX)
        when = born.get(path.relative_to(project.root).as_posix())
        found.append(
            msgspec.structs.replace(
                entry,
                checks=proven.get((entry.release, entry.step)),
                since=None if when is None else _date(when),
                age=None if when is None else today - when // _DAY,
            )
        )
    return found


def _checks(
    project: Project, cache: Cache, store: Store, release: Release
) -> dict[str, str]:
    series, problem = trees_before_failure(store, project, release, offline=True)
    words = {
        proof.step.slug: "not " + ", ".join(proof.missing) if proof.missing else "green"
        for proof in (proofs(project, cache, series) if series is not None else ())
    }
    if problem is not None and problem.step is not None:
        words[problem.step] = "does not apply"
    return words


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def long_cell(entry: Entry) -> str:
    """As `cell`, with checks and age as this machine knows them."""
    age = "new" if entry.age is None else f"{entry.age} d"
    return f"{cell(entry)}, {entry.checks or 'unknown'}, {age}"


def cell(entry: Entry) -> str:
    """One step in a matrix: `+120 -` brought lines are told apart by name."""
    size = f"{entry.changed} lines"
    if entry.brought:
        size += f" + {entry.brought} new"
    return f"{size}, {entry.upstream}"


def matrix(
    found: Iterable[Entry], names: Sequence[str]
) -> list[tuple[str, list[Entry | None]]]:
    """Rows of slugs, columns of releases. Slugs keep the order of the series: one
    stands before another if the first release that has both says so."""
    columns: dict[str, dict[str, Entry]] = {name: {} for name in names}
    order: list[str] = []
    for entry in found:
        columns[entry.release][entry.step] = entry
    for steps in columns.values():
        place = 0
        for slug in steps:
            if slug in order:
                place = max(place, order.index(slug) + 1)
            else:
                order.insert(place, slug)
                place += 1
    return [(slug, [columns[name].get(slug) for name in names]) for slug in order]


def markdown(found: Iterable[Entry], names: Sequence[str]) -> str:
    """The matrix as a Markdown table."""
    lines = [
        "| step | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for slug, row in matrix(found, names):
        cells = [cell(entry) if entry else "" for entry in row]
        lines.append(f"| `{slug}` | " + " | ".join(cells) + " |")
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def listing(found: Sequence[Entry], names: Sequence[str]) -> str:
    """The page of all steps: a row for each step and release, steps in the matrix's
    order."""
    heads = ("step", "release", "lines", "new", "upstream", "dropped when")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for slug, row in matrix(found, names):
        for entry in filter(None, row):
            cells = (
                f"`{slug}`",
                entry.release,
                str(entry.changed),
                str(entry.brought),
                entry.upstream,
                entry.removal,
            )
            lines.append("| " + " | ".join(cells).replace("|  |", "| |") + " |")
    return _STEPS_HEAD + "\n".join(lines) + "\n"


def readme(project: Project, releases: Releases) -> tuple[str, str]:
    """The README as it is, and as it would be with a fresh status section.

    Raises:
        UsageError: there is no README, or it has no section.
    """
    path = project.root / README
    text = path.read_text("utf-8") if path.is_file() else ""
    if not _SECTION.search(text):
        raise UsageError(
            f"no section between {BEGIN} and {END}",
            path=path,
            hint=f"add the two lines to {README}",
        )
    table = markdown(entries(project, releases), releases.names)
    section = f"{BEGIN}\n{table}{END}"
    return text, _SECTION.sub(lambda _: section, text, count=1)


def _pages(project: Project, releases: Releases) -> list[tuple[Path, str, str]]:
    steps = project.root / STEPS
    old = steps.read_text("utf-8") if steps.is_file() else ""
    new = listing(entries(project, releases), releases.names)
    return [
        (project.root / README, *readme(project, releases)),
        (steps, old, new),
    ]


def write_readme(project: Project, releases: Releases) -> bool:
    """Refresh the README's section and the page of all steps; whether anything
    changed."""
    stale = [page for page in _pages(project, releases) if page[1] != page[2]]
    for path, _, new in stale:
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as file:
            file.write(new.encode())
    return bool(stale)


def require_fresh(project: Project, releases: Releases) -> None:
    """Insist that the README's section and the page of all steps say what the series
    say.

    Raises:
        UsageError: one of them does not.
    """
    for path, old, new in _pages(project, releases):
        if old != new:
            name = path.relative_to(project.root)
            raise UsageError(
                f"the status in {name} is stale",
                path=path,
                hint="xpustack status --write-readme",
            )
