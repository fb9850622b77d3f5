# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: what changed, in sections of wheels that were recorded together.

`xpustack stamp` adds lines; people edit them. One line names all releases of which it
is true, so a change of many series is told once. A line that a person wrote or changed
is kept, and what it says of a step is not said again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
_WHEELS = "Wheels: "
_WHEEL = re.compile(r"`([^`+]+)\+xpu\.dsv4\.(\d+)`")
_RELEASES = re.compile(r" \((v[0-9][^()]*)\)$")
_OF_STEP = re.compile(r"- (Added |Changed |Dropped |)`([^`]+)`")


@dataclass
class _Section:
    """The wheels of a section, each release with its revision, and its lines."""

    wheels: dict[str, int]
    lines: list[str] = field(default_factory=list)


class Changelog:
    """The changelog's text and the pinned releases in `order`, oldest first."""

    def __init__(self, text: str, order: Sequence[str]) -> None:
        self._order = tuple(order)
        self._head, *parts = re.split(r"^## (?=\S)", text or _HEAD, flags=re.MULTILINE)
        self._sections = [_section(part) for part in parts]
        self._newest: _Section | None = None

    def add(
        self,
        release: str,
        revision: int,
        change: Change,
        subjects: Mapping[str, str],
        *,
        first: bool = False,
        kept: str = "",
    ) -> None:
        """Add the lines of one revision. New revisions share one new section.

        Args:
            change: what the revision changed.
            subjects: the subject of each step of the series, by slug.
            first: no earlier revision of the release is recorded.
            kept: why the change is recorded under the number of an earlier record.
        """
        section = self._section(release, revision)
        own = [line for line in section.lines if self._is_of(line, release)]
        for line in _lines(change, subjects, "" if first else "Added ", kept):
            if not any(_says(old, line) for old in own):
                self._add_line(section, line, release)

    def text(self) -> str:
        parts = [self._head.rstrip("\n")]
        for section in self._sections:
            wheels = [
                f"`{release[1:]}+xpu.dsv4.{section.wheels[release]}`"
                for release in self._newest_first(section.wheels)
            ]
            body = "\n".join(section.lines).strip("\n")
            parts += [f"## {wheels[0].strip('`')}", _WHEELS + ", ".join(wheels), body]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _section(self, release: str, revision: int) -> _Section:
        for section in self._sections:
            if section.wheels.get(release) == revision:
                return section
        if self._newest is None:
            self._newest = _Section({})
            self._sections.insert(0, self._newest)
        self._newest.wheels[release] = revision
        return self._newest

    def _add_line(self, section: _Section, line: str, release: str) -> None:
        """Name the release in the line that says the same, or add the line."""
        for at, old in enumerate(section.lines):
            match = _RELEASES.search(old)
            if match and old[: match.start()] == line:
                releases = [*self._names(match[1]), release]
                section.lines[at] = line + self._ending(releases)
                return
        section.lines.append(line + self._ending([release]))

    def _is_of(self, line: str, release: str) -> bool:
        """Whether a line is true of a release: without a list, it is of all."""
        match = _RELEASES.search(line)
        return match is None or release in self._names(match[1])

    def _names(self, text: str) -> list[str]:
        """The releases in a list such as `v0.20.2, v0.22.1 to v0.33.0`."""
        names: list[str] = []
        for part in text.split(", "):
            begin, _, end = part.partition(" to ")
            if begin in self._order and end in self._order:
                at = self._order.index
                names += self._order[at(begin) : at(end) + 1]
            else:
                names += filter(None, (begin, end))
        return names

    def _ending(self, releases: Sequence[str]) -> str:
        """The list of releases that ends a line; neighbours are a range."""
        runs: list[list[str]] = []
        for name in reversed(self._newest_first(releases)):
            place = self._order.index(name) if name in self._order else -1
            if runs and place > 0 and self._order[place - 1] == runs[-1][-1]:
                runs[-1].append(name)
            else:
                runs.append([name])
        parts = []
        for run in runs:
            parts += run if len(run) < 3 else [f"{run[0]} to {run[-1]}"]
        return f" ({', '.join(parts)})"

    def _newest_first(self, releases: Sequence[str] | dict[str, int]) -> list[str]:
        place = {name: at for at, name in enumerate(self._order)}
        return sorted(set(releases), key=lambda name: (-place.get(name, -1), name))


def _section(part: str) -> _Section:
    _, _, body = part.partition("\n")
    lines = body.strip("\n").split("\n")
    wheels: dict[str, int] = {}
    for number, line in enumerate(lines):
        if line.startswith(_WHEELS):
            wheels = {f"v{name}": int(at) for name, at in _WHEEL.findall(line)}
            del lines[: number + 1]
            break
    while lines and not lines[0]:
        del lines[0]
    return _Section(wheels, lines)


def _lines(
    change: Change, subjects: Mapping[str, str], added: str, kept: str
) -> Iterator[str]:
    for word, slugs in ((added, change.added), ("Changed ", change.changed)):
        for slug in slugs:
            yield f"- {word}`{slug}`: {_plain(subjects[slug])}"
    for slug in change.dropped:
        yield f"- Dropped `{slug}`"
    if change.moved:
        yield "- The order of the steps changed"
    if kept:
        yield f"- Recorded again under this number: {kept}"


def _says(old: str, line: str) -> bool:
    """Whether a section's line already says of a step what a new line would. That a
    step is in the first record, or was added, does not say that it changed since."""
    new = _OF_STEP.match(line)
    if new is None:
        return _RELEASES.sub("", old) == line
    own = re.fullmatch(rf"{_OF_STEP.pattern}(?::.*| \(.*)?", old)
    if own is None or own[2] != new[2]:
        return f"`{new[2]}`" in old
    begin = ("", "Added ")
    return own[1] == new[1] or (own[1] in begin and new[1] in begin)


def _plain(subject: str) -> str:
    return _TAGS.sub("", subject).strip()
