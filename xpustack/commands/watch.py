# SPDX-License-Identifier: Apache-2.0
"""`xpustack watch`: what upstream did since the newest pin."""

import dataclasses

from xpustack.core.errors import CheckFailed
from xpustack.core.project import Project
from xpustack.refresh.watch import watch as watch_upstream
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
    whose Upstream-Status is Backport does not count."""
    with answering("watch", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            report = watch_upstream(
                Project.find(), cache, offline=offline, progress=progress
            )
        answer.data = {**dataclasses.asdict(report), "news": report.news}
        answer.say(f"newest pin: {report.newest_pin}")
        answer.say(f"newer releases: {', '.join(report.newer) or 'none'}")
        for step in report.landed:
            mark = " (known)" if step.known else ""
            answer.say(
                f"{step.release} {step.step}: in {step.newer}, {step.evidence}{mark}"
            )
        if not report.landed:
            answer.say(f"no step of a pinned release is in {report.compared}")
        for version in report.newer[-1:]:
            answer.say(f"next: xpustack refresh v{version} --from {report.newest_pin}")
        if report.news:
            answer.exit_code = CheckFailed.exit_code
