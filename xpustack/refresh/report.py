# SPDX-License-Identifier: Apache-2.0
"""A refresh as a table, as JSON and as a Markdown page for docs/refresh/."""

from collections import Counter
from collections.abc import Iterator

import msgspec

from xpustack.core.markdown import table
from xpustack.refresh.carry import Clash
from xpustack.refresh.refresh import Refreshed
from xpustack.refresh.work import Moved


def summary(done: Refreshed) -> str:
    """One line: how many steps came out how."""
    counts = Counter(one.outcome for one in done.steps)
    parts = [f"{count} {outcome}" for outcome, count in counts.items()]
    return f"{done.source} to {done.release.name}: {', '.join(parts) or 'no steps'}"


def rows(done: Refreshed) -> list[dict[str, str]]:
    """The table: one row a step."""
    return [
        {"step": one.step, "outcome": _outcome(one), "why": one.text or _places(one)}
        for one in done.steps
    ]


def to_json(done: Refreshed) -> dict[str, object]:
    """The whole report as plain data."""
    return {
        "release": done.release.name,
        "from": done.source,
        "seconds": round(done.seconds, 3),
        "open": len(done.open),
        "directory": str(done.directory) if done.directory else None,
        "written": None
        if done.stale is None
        else [f"{one.kind} {one.path}" for one in done.stale],
        "steps": [msgspec.to_builtins(one) for one in done.steps],
    }


def conflicts(done: Refreshed) -> Iterator[str]:
    """Each conflict with both sides and the upstream change behind it."""
    for one in done.steps:
        for clash in one.clashes if one.outcome == "conflict" else ():
            yield f"\n{one.step}: {clash.path} ({clash.kind})"
            yield from (f"  {line}" for line in _sides(done, clash))


def markdown(done: Refreshed) -> str:
    """The page of a refresh: each step's outcome, what upstream changed in the
    files that it touches, and every conflict."""
    lines = [
        f"# {done.source} to {done.release.name}",
        "",
        f"Written by `xpustack refresh {done.release.name} --from {done.source}"
        " --report FILE`.",
        "",
        table(
            ("step", "outcome", "why"),
            ((f"`{row['step']}`", row["outcome"], row["why"]) for row in rows(done)),
        ),
        "",
        table(
            ("file", "lines changed upstream", "step", "outcome"),
            (
                (
                    f"`{file.path}`",
                    "the file is gone"
                    if file.upstream_lines is None
                    else file.upstream_lines,
                    f"`{one.step}`",
                    one.outcome,
                )
                for one in done.steps
                for file in one.files
            ),
        ),
    ]
    for one in done.steps:
        for clash in one.clashes:
            lines += [
                "",
                f"## `{one.step}`: `{clash.path}`, {clash.kind}",
                "",
                "```diff",
            ]
            lines += [*_sides(done, clash), "```"]
    return "\n".join(lines) + "\n"


def _sides(done: Refreshed, clash: Clash) -> Iterator[str]:
    if not clash.ours:
        yield f"# no lines collide: {clash.kind}"
        return
    yield f"# the step, on {done.source}: {clash.hunk}"
    yield from clash.ours
    yield f"# upstream, up to {done.release.name}: {clash.upstream_hunk}"
    yield from clash.theirs


def _outcome(one: Moved) -> str:
    return f"{one.outcome} (tentative)" if one.tentative else one.outcome


def _places(one: Moved) -> str:
    return ", ".join(dict.fromkeys(clash.path for clash in one.clashes))
