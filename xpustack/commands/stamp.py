# SPDX-License-Identifier: Apache-2.0
"""`xpustack stamp`: record what a release's revision holds, and raise it."""

import re
from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.base.releases import Release
from xpustack.core.cache import atomic_file
from xpustack.core.errors import SeriesError, UsageError
from xpustack.core.files import link_in, without_link
from xpustack.core.project import Project
from xpustack.pages.changelog import CHANGELOG, Changelog
from xpustack.series import revision
from xpustack.series.patch import load_series
from xpustack.series.revision import Change, Record
from xpustack.terminal.console import AsJson, answering
from xpustack.terminal.selection import AllReleases, ReleaseName, selected


def stamp(
    release: ReleaseName = None,
    all_: AllReleases = False,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="REASON",
            help="Record under the same number, and why nobody has a wheel of it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record the content of a release's series under its revision.

    Where the content changed since the last record, the revision in releases.toml is
    raised first, and CHANGELOG.md gets a line for each step that changed, which names
    its releases. With --keep the number stays, and CHANGELOG.md says why."""
    with answering("stamp", as_json) as answer:
        if keep is not None and not keep.strip():
            raise UsageError(
                "--keep wants the reason why nobody has a wheel of this revision",
                hint='xpustack stamp RELEASE --keep "REASON"',
            )
        project = Project.find()
        pinned = releases.load(project)
        chosen = selected(pinned, release, all_, "stamp")
        records = revision.read_records(project)
        pins = project.releases_file.read_text("utf-8")
        log_path = project.root / CHANGELOG
        log = Changelog(
            log_path.read_text("utf-8") if log_path.is_file() else "", pinned.names
        )
        rows = []
        for pin in chosen:
            steps = load_series(project, pin.name)
            digests = revision.step_digests(project, steps)
            record = records.get(pin.name)
            difference = revision.change(record or Record(0, {}), digests)
            number = pin.revision
            if record is not None and difference and keep is None:
                number = max(number, record.revision + 1)
            if record is None or difference or record.revision != number:
                records[pin.name] = Record(number, digests)
                pins = _with_revision(pins, pin, number)
                log.add(
                    pin.name,
                    number,
                    difference,
                    {step.slug: step.subject for step in steps},
                    first=record is None,
                    kept=_reason(keep, record, number, difference),
                )
                words = "; ".join(difference.lines()) if record else "first record"
                answer.say(f"{pin.name}: revision {number}: {words or 'raised'}")
            else:
                answer.say(f"{pin.name}: revision {number}: unchanged")
            rows.append({"release": pin.name, "revision": number})
        ordered = {name: records[name] for name in pinned.names if name in records}
        texts = {
            project.releases_file: pins.encode(),
            log_path: log.text().encode(),
            project.root / revision.RECORDS: revision.records_text(ordered),
        }
        for path in texts:
            if link_in(path, project.root):
                raise SeriesError(
                    "this is a symbolic link, and links are not followed",
                    path=path,
                    hint=without_link(path),
                )
        # The record comes last: until it is there, the check still complains.
        for path, text in texts.items():
            with atomic_file(path) as file:
                file.write(text)
        answer.data = rows


def _reason(
    keep: str | None, record: Record | None, number: int, difference: Change
) -> str:
    """Why a changed series keeps its number, on one line; empty where it does not."""
    if keep is None or record is None or record.revision != number or not difference:
        return ""
    return " ".join(keep.split())


def _with_revision(pins: str, release: Release, number: int) -> str:
    """releases.toml with another revision of one release."""
    return re.sub(
        rf'(?m)(^version = "{re.escape(release.version)}"\n(?:(?!\[\[).*\n)*?'
        r"revision = )\d+$",
        rf"\g<1>{number}",
        pins,
        count=1,
    )
