# SPDX-License-Identifier: Apache-2.0
"""What a revision of a release holds, and whether the series still holds that.

`releases.toml` has a release's revision and, as `content`, one digest of its steps: the
patches and all new files that they bring. A wheel's version ends in the revision, so
two wheels of one revision must have one content. Which steps differ, git's history
says.
"""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.base.releases import Release
from stack.core import history
from stack.core.errors import SeriesError, StackError
from stack.core.project import Project
from stack.series.diff import without_places
from stack.series.overlay import NewFiles
from stack.series.patch import format_patch, load_series
from stack.series.tree import Step


@dataclass(frozen=True)
class Change:
    """How a series differs from an older one, by slugs."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    dropped: tuple[str, ...]
    moved: bool

    def lines(self) -> list[str]:
        """The change in words, one line for each kind."""
        kinds = (
            ("added", self.added),
            ("changed", self.changed),
            ("dropped", self.dropped),
        )
        lines = [f"{word}: {', '.join(slugs)}" for word, slugs in kinds if slugs]
        lines += ["the order of the steps changed"] if self.moved else []
        return lines or ["git's history does not say which steps"]


def step_digests(project: Project, steps: Sequence[Step]) -> dict[str, str]:
    """The sha256 of each step's patch, overlay files and kernels, in order. Line
    numbers of hunks do not count: where releases share a patch, its lines move.

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


def content(digests: Mapping[str, str]) -> str:
    """The digest of a whole series, from those of its steps in their order."""
    text = "".join(f"{slug} {digest}\n" for slug, digest in digests.items())
    return hashlib.sha256(text.encode()).hexdigest()


def change(before: Mapping[str, str], after: Mapping[str, str]) -> Change:
    """How a series differs from an older one, by the digests of their steps."""
    both = [slug for slug in before if slug in after]
    return Change(
        added=tuple(slug for slug in after if slug not in before),
        changed=tuple(slug for slug in both if before[slug] != after[slug]),
        dropped=tuple(slug for slug in before if slug not in after),
        moved=both != [slug for slug in after if slug in before],
    )


def difference(
    project: Project, release: Release, digests: Mapping[str, str]
) -> Change:
    """How a series differs from the recorded one, which is in git's history. A record
    that is not committed yet is taken for that of the last commit; where git has
    neither, the change is empty."""
    if not release.content:
        return change({}, digests)
    folders = (project.patches, project.overlay, project.kernels)
    file = project.releases_file
    commit = history.commit_that_wrote(project, file, release.content) or "HEAD"
    with tempfile.TemporaryDirectory() as place:
        history.unpack(project, commit, folders, Path(place))
        before = Project(Path(place))
        try:
            old = step_digests(before, load_series(before, release.name))
        except StackError:
            old = {}
    return change(old, digests) if old else Change((), (), (), False)


def require_recorded(project: Project, release: Release, steps: Sequence[Step]) -> None:
    """Insist that the series of a release is the one that its revision holds. A release
    without a recorded content passes.

    Raises:
        SeriesError: the series changed.
    """
    digests = step_digests(project, steps)
    if release.content in ("", content(digests)):
        return
    raise SeriesError(
        f"the series changed since revision {release.revision} was recorded",
        release=release.name,
        path=project.releases_file,
        detail=difference(project, release, digests).lines(),
        hint=f"xpustack stamp {release.name}",
    )
