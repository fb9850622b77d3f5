# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: what changed, by release and revision.

`xpustack stamp` adds lines; people edit them. A line that a person wrote or changed is
kept, and what it says of a step is not said again.
"""

import re
from collections.abc import Mapping, Sequence

from xpustack.series.revision import Change

CHANGELOG = "CHANGELOG.md"
_HEAD = """\
# Changelog

What changed in the wheels, newest release first: `v0.33.0`, revision 4 is the wheel
`vllm-0.33.0+xpu.dsv4.4`. `xpustack stamp` adds the lines from the steps' subjects; edit
them freely, it keeps what is there.
"""
_TAGS = re.compile(r"^(?:\[[^\]]+\]\s*)+")
_FIRST = "The first recorded revision. Its steps:"


def with_changes(
    text: str,
    release: str,
    revision: int,
    change: Change,
    subjects: Mapping[str, str],
    order: Sequence[str],
    *,
    first: bool = False,
    kept: str = "",
) -> str:
    """The changelog with the lines of one revision.

    Args:
        text: the changelog as it is; empty to begin one.
        change: what the revision changed.
        subjects: the subject of each step of the series, by slug.
        order: the pinned releases, oldest first.
        first: no earlier revision of the release is recorded.
        kept: why the change is recorded under the number of an earlier record.
    """
    head, sections = _split(text or _HEAD)
    body = sections.setdefault(release, [])
    title = f"### Revision {revision}"
    if title not in body:
        body[:0] = ["", title, ""]
    begin = body.index(title) + 1
    ends = [at for at, line in enumerate(body) if at >= begin and line[:4] == "### "]
    end = ends[0] if ends else len(body)
    section = body[begin:end]
    lines = [
        line
        for slug, line in _lines(change, subjects, "" if first else "Added ")
        if not any(_says(old, line, slug) for old in section)
    ]
    if kept:
        lines.append(f"- Recorded again under this number: {kept}")
    if first and _FIRST not in section:
        lines[:0] = [_FIRST, ""]
    while section and not section[-1]:
        section.pop()
    section = [*(section or [""]), *lines, ""]
    body[begin:end] = section if section[0] == "" else ["", *section]
    while body and not body[-1]:
        body.pop()
    newest_first = sorted(
        sections, key=lambda name: order.index(name) if name in order else -1
    )
    parts = [head.rstrip("\n")]
    for name in reversed(newest_first):
        parts.append("\n".join([f"## {name}", *sections[name]]))
    return "\n\n".join(parts) + "\n"


def _lines(
    change: Change, subjects: Mapping[str, str], added: str
) -> list[tuple[str, str]]:
    lines = []
    for word, slugs in ((added, change.added), ("Changed ", change.changed)):
        for slug in slugs:
            lines.append((slug, f"- {word}`{slug}`: {_plain(subjects[slug])}"))
    lines += [(slug, f"- Dropped `{slug}`") for slug in change.dropped]
    if change.moved:
        lines.append(("", "- The order of the steps changed"))
    return lines


def _says(old: str, line: str, slug: str) -> bool:
    """Whether a section's line already says of a step what a new line would. That a
    step is in the first record, or was added, does not say that it changed since."""
    if not slug:
        return old == line
    own = re.fullmatch(rf"- (Added |Changed |Dropped |)`{slug}`(?::.*)?", old)
    if own is None:
        return f"`{slug}`" in old
    same = ("- `", "- Added `") if own[1] in ("", "Added ") else f"- {own[1]}`"
    return line.startswith(same)


def _plain(subject: str) -> str:
    return _TAGS.sub("", subject).strip()


def _split(text: str) -> tuple[str, dict[str, list[str]]]:
    """The text before the first release, and the lines of each release's section."""
    head, *parts = re.split(r"^## (?=\S)", text, flags=re.MULTILINE)
    sections = {}
    for part in parts:
        name, _, body = part.partition("\n")
        sections[name.strip()] = body.rstrip("\n").split("\n")
    return head, sections
