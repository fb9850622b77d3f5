# SPDX-License-Identifier: Apache-2.0
"""`xpustack stamp`: record what a release's revision holds, and raise it."""

from msgspec.structs import replace

from stack.base import releases
from stack.base.pin import with_entry
from stack.core.cache import atomic_file
from stack.core.files import link_in, linked
from stack.core.project import Project
from stack.series import revision
from stack.series.patch import load_series
from stack.terminal.console import AllReleases, ReleaseName, Reply, selected


def stamp(
    release: ReleaseName = None,
    /,
    *,
    all_: AllReleases = False,
    keep: bool = False,
    answer: Reply,
) -> None:
    """Record the content of a release's series under its revision.

    Where the content changed since the last record, the revision in releases.toml is
    raised first. With --keep the number stays.

    Args:
        keep: Record under the same number, of which nobody has a wheel.
    """
    project = Project.find()
    pinned = releases.load(project)
    pins = project.releases_file.read_text("utf-8")
    rows = []
    for pin in selected(pinned, release, all_, "stamp"):
        steps = load_series(project, pin.name)
        digests = revision.step_digests(project, steps)
        content, number = revision.content(digests), pin.revision
        if content == pin.content:
            answer.say(f"{pin.name}: revision {number}: unchanged")
        else:
            if pin.content and not keep:
                number += 1
            change = revision.difference(project, pin, digests)
            stamped = replace(pin, revision=number, content=content)
            pins = with_entry(pins, stamped)
            words = "; ".join(change.lines()) if pin.content else "first record"
            answer.say(f"{pin.name}: revision {number}: {words}")
        rows.append({"release": pin.name, "revision": number})
    if link_in(project.releases_file, project.root):
        raise linked(project.releases_file)
    with atomic_file(project.releases_file) as file:
        file.write(pins.encode())
    answer.data = rows
