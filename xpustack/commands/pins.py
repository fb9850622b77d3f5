# SPDX-License-Identifier: Apache-2.0
"""`xpustack pin`, `retire` and `watch`: which releases there are, and what upstream did
since the newest."""

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from stack.base.pin import pin as pin_release
from stack.core.errors import CheckFailed
from stack.core.markdown import rendered
from stack.refresh.retire import retire as retire_releases
from stack.refresh.watch import SCHEMAS
from stack.refresh.watch import watch as watch_upstream
from stack.terminal.console import Offline, Reply, working


def pin(version: str, /, *, answer: Reply) -> None:
    """Find, download, hash and read a release, and add it to releases.toml.

    Args:
        version: Such as 0.34.0.
    """
    with working() as (project, cache):
        release = pin_release(project, cache, version)
    answer.data = release
    answer.say(f"pinned {release.name}: {release.sdist} sha256 {release.sha256}")


def retire(
    first: Annotated[str, Parameter("RELEASE")],
    /,
    *more: Annotated[str, Parameter("RELEASE")],
    answer: Reply,
) -> None:
    """Take releases out of the stack, with all that no other release uses.

    The last commit that has them stays in releases.toml: `xpustack build` makes their
    wheels from there. The files must be committed before.

    Args:
        first: Such as v0.22.1.
    """
    names = (first, *more)
    with working() as (project, cache):
        files = retire_releases(project, cache, names)
    answer.data = {"changed": files}
    answer.say(*(f"{file.kind} {file.path}" for file in files))
    answer.say(
        "next: xpustack status --write-readme; xpustack check --static; what the tests"
        f" and pages say of {', '.join(names)}"
    )


def watch(*, offline: Offline = False, answer: Reply) -> None:
    """Compare the pins with the package index, and the series with the newest release.

    Lists releases without a pin (newer ones, gaps, newer patch releases), newer
    versions of vllm-xpu-kernels, models of the newest release that have no XPU path,
    and steps that the newest release has.

    For a scheduled job: exit code 0 means that there is nothing to do, 1 that there is,
    3 that an archive cannot be fetched, 5 that the index cannot be reached. `(known)`
    marks what needs no action, such as a step whose Upstream-Status is Backport."""
    with working(offline) as (project, cache):
        report = watch_upstream(project, cache)
    answer.data = {**dataclasses.asdict(report), "news": report.news}
    values = {"report": report, "schemas": SCHEMAS}
    answer.say(rendered("xpustack.commands", "watch.txt", values).rstrip("\n"))
    if report.news:
        answer.exit_code = CheckFailed.exit_code
