# SPDX-License-Identifier: Apache-2.0
"""`xpustack watch`."""

import dataclasses

from xpustack.core.errors import CheckFailed
from xpustack.core.project import Project
from xpustack.refresh.watch import watch as look
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)


def watch(offline: Offline = False, as_json: AsJson = False) -> None:
    """Say which releases are newer than the newest pin, and which steps of pinned
    releases the newest release has.

    For a scheduled job: exit code 1 means that there is something to do. A step
    whose Upstream-Status says Backport is no news."""
    with answering("watch", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            found = look(Project.find(), cache, offline=offline, progress=progress)
        answer.data = {**dataclasses.asdict(found), "news": found.news}
        answer.say(f"newest pin: {found.newest_pin}")
        answer.say(f"newer releases: {', '.join(found.newer) or 'none'}")
        for landed in found.landed:
            mark = " (known)" if landed.known else ""
            answer.say(
                f"{landed.release} {landed.step}: in {landed.newer},"
                f" {landed.evidence}{mark}"
            )
        if not found.landed:
            answer.say(f"no step of a pinned release is in {found.compared}")
        for version in found.newer[-1:]:
            answer.say(f"next: xpustack refresh v{version} --from {found.newest_pin}")
        if found.news:
            answer.exit_code = CheckFailed.exit_code
