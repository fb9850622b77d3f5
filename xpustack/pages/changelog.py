# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: what changed, in sections of wheels that were stamped together.

`xpustack stamp` adds lines; people edit them. One line names all releases of which it
is true.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xpustack.series.revision import Change

CHANGELOG = "CHANGELOG.md"
_HEAD = """\
# Changelog

What changed in the wheels that each section lists, newest first. A line ends with the
releases of which it is true; one without `Added`, `Changed` or `Dropped` names a step
of their first recorded revision. `xpustack stamp` adds the lines from the steps'
subjects; edit them freely, it keeps what is there.
"""
_TAGS = re.compile(r"^(?:\[[^\]]+\]\s*)+")


@dataclass(frozen=True)
class Entry:
    """A revision of a release, and what it changed.

    Attributes:
        subjects: the subject of each step of the series, by slug.
        first: no earlier revision of the release is recorded.
        kept: why the change is recorded under the number of an earlier record.
    """

    wheel: str
    change: Change
    subjects: Mapping[str, str]
    first: bool = False
    kept: str = ""

    def lines(self) -> Iterator[str]:
        change, added = self.change, "" if self.first else "Added "
        for word, slugs in ((added, change.added), ("Changed ", change.changed)):
            for slug in slugs:
                subject = _TAGS.sub("", self.subjects[slug]).strip()
                yield f"- {word}`{slug}`: {subject}"
        for slug in change.dropped:
            yield f"- Dropped `{slug}`"
        if change.moved:
            yield "- The order of the steps changed"
        if self.kept:
            yield f"- Recorded again under this number: {self.kept}"


def with_entries(text: str, entries: Mapping[str, Entry], order: Sequence[str]) -> str:
    """The changelog with a new section for the entries of releases. If the newest
    section lists these wheels already, it gets the lines that are new. A line that a
    person reworded is not repeated as long as it begins with the step's name and ends
    with the same releases.

    Args:
        order: all releases, oldest first.
    """
    if not entries:
        return text
    names = [name for name in order if name in entries]
    wheels = [entries[name].wheel for name in reversed(names)]
    lines: dict[str, list[str]] = {}
    for name in names:
        for line in entries[name].lines():
            lines.setdefault(line, []).append(name)
    head, *sections = re.split(r"^(?=## )", text or _HEAD, flags=re.MULTILINE)
    listed = [f"`{wheel}`" for wheel in wheels]
    if not sections or not all(wheel in sections[0] for wheel in listed):
        sections.insert(0, f"## {wheels[0]}\n\nWheels: {', '.join(listed)}\n\n")
        head = f"{head.rstrip()}\n\n"
    own = sections[0].rstrip("\n")
    olds = own.splitlines()
    new = []
    for line, releases in lines.items():
        begin = line.partition(": ")[0] if "`: " in line else line
        end = f" ({_span(releases, order)})"
        if not any(old.startswith(begin) and old.endswith(end) for old in olds):
            new.append(line + end)
    gap = "\n" if olds[-1].startswith("- ") else "\n\n"
    sections[0] = own + gap + "\n".join(new) if new else own
    return head + "\n\n".join(part.rstrip("\n") for part in sections) + "\n"


def _span(releases: Sequence[str], order: Sequence[str]) -> str:
    """Releases in their order; three neighbours and more are a range."""
    runs: list[list[str]] = []
    for name in releases:
        if runs and order.index(name) == order.index(runs[-1][-1]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs
    )
