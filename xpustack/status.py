# SPDX-License-Identifier: Apache-2.0
"""The matrix release by step: how large each step is and where upstream stands."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from xpustack.cache import atomic_file
from xpustack.errors import UsageError
from xpustack.project import Project
from xpustack.releases import Releases
from xpustack.series import load_series
from xpustack.static import brought_lines, changed_lines

README = "README.md"
BEGIN, END = "<!-- status -->", "<!-- /status -->"
_SECTION = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)


class Entry(msgspec.Struct, frozen=True):
    """One step of one release. `changed` counts added and removed lines of its
    patch, `brought` the lines of the overlay files and kernels that it adds."""

    release: str
    position: int
    step: str
    subject: str
    changed: int
    brought: int
    upstream: str


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
                    brought=brought_lines(project, steps[:index], step),
                    upstream=step.trailers.upstream_status,
                )
            )
    return found


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


def write_readme(project: Project, releases: Releases) -> bool:
    """Refresh the README's section; whether anything changed."""
    old, new = readme(project, releases)
    if old != new:
        with atomic_file(project.root / README) as file:
            file.write(new.encode())
    return old != new


def require_fresh(project: Project, releases: Releases) -> None:
    """Insist that the README's section says what the series say.

    Raises:
        UsageError: it does not.
    """
    old, new = readme(project, releases)
    if old != new:
        raise UsageError(
            f"the status section of {README} is stale",
            path=project.root / README,
            hint="xpustack status --write-readme",
        )
