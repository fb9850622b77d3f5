# SPDX-License-Identifier: Apache-2.0
"""A refresh as a table, as JSON and as a Markdown page."""

from collections import Counter
from collections.abc import Iterator

from stack.core.markdown import table
from stack.refresh.carry import Clash
from stack.refresh.refresh import RefreshReport


def summary(done: RefreshReport) -> str:
    """One line: the number of steps with each outcome."""
    counts = Counter(step.outcome for step in done.steps)
    parts = [f"{count} {outcome}" for outcome, count in counts.items()]
    return f"{done.source} to {done.release.name}: {', '.join(parts) or 'no steps'}"


def rows(done: RefreshReport) -> list[dict[str, str]]:
    """The table: one row per step."""
    return [
        {
            "step": step.step,
            "outcome": f"{step.outcome} (tentative)"
            if step.tentative
            else step.outcome,
            "why": step.text or ", ".join(dict.fromkeys(c.path for c in step.clashes)),
        }
        for step in done.steps
    ]


def to_json(done: RefreshReport) -> dict[str, object]:
    """The whole report as plain data."""
    return {
        "release": done.release.name,
        "from": done.source,
        "seconds": round(done.seconds, 3),
        "open": len(done.open),
        "directory": str(done.directory) if done.directory else None,
        "written": None
        if done.stale is None
        else [f"{file.kind} {file.path}" for file in done.stale],
        "steps": done.steps,
    }


def conflicts(done: RefreshReport) -> Iterator[str]:
    """Each conflict with both sides and the upstream change behind it."""
    for step in done.steps:
        for clash in step.clashes if step.outcome == "conflict" else ():
            yield f"\n{step.step}: {clash.path} ({clash.kind})"
            yield from (f"  {line}" for line in _sides(done, clash))


def markdown(done: RefreshReport) -> str:
    """The page of a refresh: each step's outcome, what upstream changed in the
    files that it touches, and every conflict."""
    words = f"--onto CLONE:{done.ref}" if done.ref else done.release.name
    head = ["file", "lines changed upstream", "step", "outcome"]
    files = [
        [
            f"`{file.path}`",
            "the file is gone" if file.upstream_lines is None else file.upstream_lines,
            f"`{step.step}`",
            step.outcome,
            "; ".join(file.commits),
        ]
        for step in done.steps
        for file in step.files
    ]
    if done.ref:
        head.append("commits, the newest")
    lines = [
        f"# {done.source} to {done.release.name}",
        "",
        f"Written by `xpustack refresh {words} --from {done.source} --report FILE`.",
        "",
        table(
            ("step", "outcome", "why"),
            ((f"`{row['step']}`", row["outcome"], row["why"]) for row in rows(done)),
        ),
        "",
        table(head, (row[: len(head)] for row in files)),
    ]
    for step in done.steps:
        for clash in step.clashes:
            lines += [
                "",
                f"## `{step.step}`: `{clash.path}`, {clash.kind}",
                "",
                "```diff",
            ]
            lines += [*_sides(done, clash), "```"]
    return "\n".join(lines) + "\n"


def _sides(done: RefreshReport, clash: Clash) -> Iterator[str]:
    if not clash.ours:
        yield f"# no lines collide: {clash.kind}"
        return
    yield f"# the step, on {done.source}: {clash.hunk}"
    yield from clash.ours
    yield f"# upstream, up to {done.release.name}: {clash.upstream_hunk}"
    yield from (f"# by {commit}" for commit in clash.commits)
    yield from clash.theirs
