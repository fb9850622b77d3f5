# SPDX-License-Identifier: Apache-2.0
"""`xpustack watch`."""

import dataclasses
import json

import typer

from xpustack.cache import Cache
from xpustack.console import AsJson, Offline, reporting_errors, showing_progress
from xpustack.errors import CheckFailed
from xpustack.project import Project
from xpustack.watch import watch as look


def watch(offline: Offline = False, as_json: AsJson = False) -> None:
    """Say which releases are newer than the newest pin, and which steps of pinned
    releases the newest release has.

    For a scheduled job: exit code 1 means that there is something to do. A step
    whose Upstream-Status says Backport is no news."""
    with reporting_errors(as_json), showing_progress() as progress:
        found = look(
            Project.find(), Cache.default(), offline=offline, progress=progress
        )
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "news": found.news}, indent=1))
    else:
        print(f"newest pin: {found.newest_pin}")
        print(f"newer releases: {', '.join(found.newer) or 'none'}")
        for one in found.landed:
            mark = " (known)" if one.known else ""
            print(f"{one.release} {one.step}: in {one.newer}, {one.evidence}{mark}")
        if not found.landed:
            print(f"no step of a pinned release is in {found.compared}")
        for version in found.newer[-1:]:
            print(f"next: xpustack refresh v{version} --from {found.newest_pin}")
    if found.news:
        raise typer.Exit(CheckFailed.exit_code)
