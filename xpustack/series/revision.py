# SPDX-License-Identifier: Apache-2.0
"""What a revision of a release holds, and whether the series still holds that.

`revisions.json` records, for each release, its revision and a digest of each step: the
patch and all new files that the step brings. A wheel's version ends in the revision, so
two wheels of one revision must have one content.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from xpustack.base.releases import Release
from xpustack.core.errors import SeriesError
from xpustack.core.files import read_file
from xpustack.core.project import Project
from xpustack.series.diff import without_places
from xpustack.series.overlay import NewFiles
from xpustack.series.patch import Step, format_patch

RECORDS = "revisions.json"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded revision: the sha256 of each step by slug, in the series' order."""

    revision: int
    steps: dict[str, str]


@dataclass(frozen=True)
class Change:
    """How a series differs from a recorded one, by slugs."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    dropped: tuple[str, ...]
    moved: bool

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.dropped or self.moved)

    def lines(self) -> list[str]:
        """The change in words, one line for each kind."""
        kinds = (
            ("added", self.added),
            ("changed", self.changed),
            ("dropped", self.dropped),
        )
        lines = [f"{word}: {', '.join(slugs)}" for word, slugs in kinds if slugs]
        return lines + (["the order of the steps changed"] if self.moved else [])


def step_digests(project: Project, steps: Sequence[Step]) -> dict[str, str]:
    """The sha256 of each step's patch, overlay files and kernels, in order. Where the
    hunks of the patch are does not count: releases share it, and its lines move.

    Args:
        steps: a whole series.

    Raises:
        SeriesError: a file that a step brings cannot be read.
    """
    digests = {}
    new_files = NewFiles(project)
    for step in steps:
        digest = hashlib.sha256()
        files = {path: file.content for path, file in new_files.of(step).items()}
        patch = without_places(format_patch(step))
        for name, content in [("", patch), *sorted(files.items())]:
            digest.update(f"{len(name)} {len(content)} {name}".encode() + content)
        digests[step.slug] = digest.hexdigest()
    return digests


def read_records(project: Project) -> dict[str, Record]:
    """The recorded revisions by release; none where nothing is recorded yet.

    Raises:
        SeriesError: the file is not one that `xpustack stamp` wrote.
    """
    path = project.root / RECORDS
    try:
        return msgspec.json.decode(
            read_file(path, project.root, SeriesError), type=dict[str, Record]
        )
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise SeriesError(
            "the recorded revisions cannot be read",
            path=path,
            detail=str(error),
            hint=f"git checkout -- {RECORDS}",
        ) from None


def records_text(records: Mapping[str, Record]) -> bytes:
    """The text of `revisions.json`."""
    text = msgspec.json.format(msgspec.json.encode(dict(records)), indent=1)
    return text + b"\n"


def change(record: Record, digests: Mapping[str, str]) -> Change:
    """How a series with these digests differs from the recorded one."""
    before, after = record.steps, digests
    both = [slug for slug in before if slug in after]
    return Change(
        added=tuple(slug for slug in after if slug not in before),
        changed=tuple(slug for slug in both if before[slug] != after[slug]),
        dropped=tuple(slug for slug in before if slug not in after),
        moved=both != [slug for slug in after if slug in before],
    )


def require_recorded(project: Project, release: Release, steps: Sequence[Step]) -> None:
    """Insist that the series of a release is the one that its revision records. A
    release without a record passes.

    Raises:
        SeriesError: the series changed, or the record is of another revision.
    """
    record = read_records(project).get(release.name)
    if record is None:
        return
    difference = change(record, step_digests(project, steps))
    if difference:
        raise SeriesError(
            f"the series changed since revision {record.revision} was recorded",
            release=release.name,
            path=project.root / RECORDS,
            detail=difference.lines(),
            hint=f"xpustack stamp {release.name}",
        )
    if record.revision != release.revision:
        raise SeriesError(
            f"{project.releases_file.name} says revision {release.revision},"
            f" the record is of revision {record.revision}",
            release=release.name,
            path=project.root / RECORDS,
            hint=f"xpustack stamp {release.name}",
        )
