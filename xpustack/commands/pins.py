# SPDX-License-Identifier: Apache-2.0
"""`xpustack pin` and `watch`: releases, and what upstream did since the newest."""

import dataclasses
from collections.abc import Iterator

from xpustack.base.pin import pin as pin_release
from xpustack.core.errors import CheckFailed
from xpustack.refresh.watch import SCHEMAS, WatchReport
from xpustack.refresh.watch import watch as watch_upstream
from xpustack.terminal.console import Offline, Reply, working


def pin(version: str, /, *, answer: Reply) -> None:
    """Find, download, hash and read a release, and add it to releases.toml.

    Args:
        version: Such as 0.24.0.
    """
    with working() as work:
        release = pin_release(work.project, work.cache, version)
    answer.data = release
    answer.say(f"pinned {release.name}: {release.sdist} sha256 {release.sha256}")


def watch(*, offline: Offline = False, answer: Reply) -> None:
    """Compare the pins with the package index, and the series with the newest release.

    Lists releases without a pin (newer ones, gaps, newer patch releases), newer
    versions of vllm-xpu-kernels, models of the newest release that have no XPU path,
    and steps that the newest release has.

    For a scheduled job: exit code 0 means that there is nothing to do, 1 that there is,
    3 that an archive cannot be fetched, 5 that the index cannot be reached. `(known)`
    marks what needs no action, such as a step whose Upstream-Status is Backport."""
    with working(offline) as work:
        report = watch_upstream(work.project, work.cache)
    answer.data = {**dataclasses.asdict(report), "news": report.news}
    answer.say(*_lines(report))
    if report.news:
        answer.exit_code = CheckFailed.exit_code


def _lines(report: WatchReport) -> Iterator[str]:
    """The report for people, what to do next at the end."""
    yield f"newest pin: {report.newest_pin}"
    yield f"newer releases: {', '.join(report.newer) or 'none'}"
    for gap in report.gaps:
        yield f"{gap.version}: its minor has no pin"
    for patch in report.patches:
        yield f"{patch.version}: newer patch release than the pin {patch.pinned}"
    for item in report.kernels:
        yield (
            f"vllm-xpu-kernels {item.newer}: newer than {item.pinned} of"
            f" {item.release}{_mark(item.known)}"
        )
    for model in report.models:
        yield f"{model.release} model {model.model}: no XPU path, {model.why}"
    for step in report.landed:
        yield (
            f"{step.release} {step.step}: in {step.newer},"
            f" {step.evidence}{_mark(step.known)}"
        )
    if not report.landed:
        yield f"no step of a pinned release is in {report.compared}"
    yield from _next(report)


def _mark(known: bool) -> str:
    return " (known)" if known else ""


def _next(report: WatchReport) -> Iterator[str]:
    """The next commands to run."""
    for version in report.newer[-1:]:
        yield f"next: xpustack refresh v{version} --from {report.newest_pin}"
    newer = {f"v{version}" for version in report.newer}
    for item in (*report.gaps, *report.patches):
        if item.version not in newer:
            yield f"next: xpustack refresh {item.version}"
    for kernels in report.kernels:
        if not kernels.known:
            yield f"next: record the ops in {SCHEMAS}/{kernels.newer}.txt"
