# SPDX-License-Identifier: Apache-2.0
"""`xpustack refresh`: carry a series over to another release."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack.base.clone import opened
from stack.base.releases import load
from stack.base.store import Store
from stack.core.cache import atomic_file
from stack.core.errors import ApplyError, UsageError
from stack.refresh.neighbours import (
    Source,
    choose_source,
    source_of_clone,
)
from stack.refresh.refresh import refresh as carry_over
from stack.refresh.refresh import target_release
from stack.refresh.report import conflicts, markdown, rows, summary, to_json
from stack.terminal.console import (
    Offline,
    Reply,
    working,
)


def refresh(
    release: str | None = None,
    /,
    *,
    source: Annotated[str | None, Parameter("--from")] = None,
    onto: str | None = None,
    to: Path | None = None,
    drop: tuple[str, ...] = (),
    write: bool = False,
    report: Path | None = None,
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Carry a series over to another release, and report step by step.

    With `--to`, a step that conflicts is left in that repository as a cherry-pick
    in progress (exit code 4): resolve it, continue the cherry-pick, and run the same
    command again. Nothing else is written until every step is carried or dropped.

    Args:
        release: Where to, such as v0.34.0.
        source: Where from, such as v0.33.0. Without it, the pinned neighbour.
        onto: `CLONE[:REF]`: carry to a commit of a git clone of vLLM instead; read
            only.
        to: The work repository: new, or that of an earlier run.
        drop: A step to leave behind, now and in later runs with the same `--to`;
            repeatable.
        write: Pin the release, write its series.
        report: Write the report there as Markdown.
    """
    if (release is None) == (onto is None):
        raise UsageError(
            "name the release to carry the series to, or --onto a clone",
            hint="xpustack watch, which names those without a pin",
        )
    if onto is not None and write:
        raise UsageError(
            "a clone is no release: it gets no pin, and export tests each branch",
            hint=f"xpustack export --onto {onto}",
        )
    with working(offline) as (project, cache), ExitStack() as stack:
        store = Store(cache)
        clone = stack.enter_context(opened(store, onto)) if onto else None
        if source is not None:
            chosen = Source(source, "as asked")
        elif clone is not None:
            chosen = source_of_clone(project, store, clone)
        else:
            target = target_release(project, cache, release or "")
            chosen = choose_source(project, target.version, to)
        refreshed = carry_over(
            project,
            cache,
            release or "",
            chosen.name,
            clone=clone,
            directory=to,
            drop=drop,
            write=write,
        )
    if report is not None:
        with atomic_file(report) as file:
            file.write(markdown(refreshed).encode())
    answer.data = {**to_json(refreshed), "why": chosen.why}
    if source is None:
        answer.say(f"from {chosen.name}: {chosen.why}")
    answer.table(rows(refreshed), ("step", "outcome", "why"))
    answer.say(*conflicts(refreshed), summary(refreshed))
    answer.say(*(f"{stale.kind} {stale.path}" for stale in refreshed.stale or ()))
    if refreshed.stale is not None:
        answer.say(f"next: xpustack status --write-readme; xpustack check {release}")
        answer.say(
            *(
                f"then: xpustack retire {old.name}, which is older than the window"
                for old in load(project).outside_window
            )
        )
    if any(step.outcome == "left" for step in refreshed.steps):
        answer.say(f"next: nothing, or --to DIR to carry what {release} is to have")
    if refreshed.open:
        answer.say(
            "next: the same command with --to DIR leaves the conflict there"
            if to is None
            else f"next: resolve it in {to}, git add, git cherry-pick --continue, then"
            " the same command again"
        )
        answer.exit_code = ApplyError.exit_code
