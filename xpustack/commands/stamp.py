# SPDX-License-Identifier: Apache-2.0
"""`xpustack stamp`: record what a release's revision holds, and raise it."""

from msgspec.structs import replace

from xpustack.base import releases
from xpustack.base.pin import with_entry
from xpustack.core.errors import UsageError
from xpustack.core.files import link_in, linked
from xpustack.core.project import Project
from xpustack.pages.changelog import CHANGELOG, Entry, with_entries
from xpustack.pages.record import write_files
from xpustack.series import revision
from xpustack.series.patch import load_series
from xpustack.terminal.console import AllReleases, ReleaseName, Reply, selected


def stamp(
    release: ReleaseName = None,
    /,
    *,
    all_: AllReleases = False,
    keep: str | None = None,
    answer: Reply,
) -> None:
    """Record the content of a release's series under its revision.

    Where the content changed since the last record, the revision in releases.toml is
    raised first, and CHANGELOG.md gets a line for each step that changed, which names
    its releases. With --keep the number stays, and CHANGELOG.md says why.

    Args:
        keep: Record under the same number; the reason why nobody has a wheel of it.
    """
    if keep is not None and not keep.strip():
        raise UsageError(
            "--keep wants the reason why nobody has a wheel of this revision",
            hint='xpustack stamp RELEASE --keep "REASON"',
        )
    project = Project.find()
    pinned = releases.load(project)
    pins = project.releases_file.read_text("utf-8")
    entries: dict[str, Entry] = {}
    rows = []
    for pin in selected(pinned, release, all_, "stamp"):
        steps = load_series(project, pin.name)
        digests = revision.step_digests(project, steps)
        content, number = revision.content(digests), pin.revision
        if content == pin.content:
            answer.say(f"{pin.name}: revision {number}: unchanged")
        else:
            if pin.content and keep is None:
                number += 1
            change = revision.difference(project, pin, digests)
            stamped = replace(pin, revision=number, content=content)
            pins = with_entry(pins, stamped)
            entries[pin.name] = Entry(
                f"{pin.version}+xpu.dsv4.{number}",
                change,
                {step.slug: step.subject for step in steps},
                first=not pin.content,
                kept=" ".join(keep.split()) if keep and pin.content else "",
            )
            words = "; ".join(change.lines()) if pin.content else "first record"
            answer.say(f"{pin.name}: revision {number}: {words}")
        rows.append({"release": pin.name, "revision": number})
    log = project.root / CHANGELOG
    text = log.read_text("utf-8") if log.is_file() else ""
    texts = {
        log: with_entries(text, entries, pinned.names),
        project.releases_file: pins,
    }
    for path in texts:
        if link_in(path, project.root):
            raise linked(path)
    # The record comes last: until it is there, the check still complains.
    write_files(texts)
    answer.data = rows
