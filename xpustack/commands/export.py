# SPDX-License-Identifier: Apache-2.0
"""`xpustack export`: a series as pull requests."""

from contextlib import ExitStack
from pathlib import Path

from stack.base import releases
from stack.base.clone import opened
from stack.base.store import Store
from stack.core.errors import UsageError, elsewhere
from stack.pages.made import stamp
from stack.refresh.neighbours import source_of_clone
from stack.series.patch import load_series
from stack.terminal.console import (
    Offline,
    Reply,
    working,
)


def export(
    release: str | None = None,
    /,
    *steps: str,
    onto: str | None = None,
    bundle: bool = False,
    rows: Path | None = None,
    to: Path | None = None,
    author: str | None = None,
    assistant: str = "an AI coding agent",
    bisect: bool = False,
    packages: Path | None = None,
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Write steps as pull requests: branches, mails, descriptions, cover.

    Each branch holds the commits that its step needs, and no others; the step's test is
    run there, before and after. Refused (exit code 1) unless the steps' checks are
    green as they are now; with --rows nothing is exported, and the tests on the
    branches alone decide.

    Args:
        release: Such as v0.33.0; with --onto the newest pin.
        steps: Steps; default: all that are not `Inappropriate`.
        onto: `CLONE[:REF]`: put the branches on a commit of a git clone of vLLM, into
            the clone.
        bundle: Write a bundle instead; the clone stays.
        rows: Only find where the steps stand, and write that to this file; its rows of
            other steps stay, and are taken as known.
        to: The folder; default: export/RELEASE.
        author: `Name <address>`; default: git's user.name, user.email.
        assistant: The AI tool that commits name as co-author.
        bisect: Build and test each exported branch.
        packages: A folder with what vLLM's own tests import, as of `upstream-tests`.
    """
    from stack.upstream.export import export as write_export
    from stack.upstream.export import standings
    from stack.upstream.folder import known_needs, write_rows
    from stack.upstream.pull_request import requests_rows
    from stack.upstream.trees import Person

    if onto is None and (release is None or bundle):
        raise UsageError(
            "name the release to export, or --onto a clone",
            hint="xpustack export v0.33.0, or --onto CLONE:main --bundle",
        )
    if rows is not None and (bundle or to or author or bisect):
        raise UsageError(
            "--rows exports nothing: leave out --bundle, --to, --author, --bisect",
            hint="xpustack export v0.33.0 --rows FILE",
        )
    with working(offline) as (project, cache), ExitStack() as stack:
        store = Store(cache)
        clone = stack.enter_context(opened(store, onto)) if onto else None
        if clone is not None:
            release = source_of_clone(project, store, clone, release).name
        pinned = releases.load(project)[release or ""]
        if rows is not None:
            stand, made = [], stamp(project, pinned.name)
            for request in standings(
                project,
                cache,
                pinned,
                slugs=steps,
                known=known_needs(rows, pinned.name),
                clone=clone,
            ):
                write_rows(rows, [request], load_series(project, pinned.name), made)
                stand += [dict(row) for row in requests_rows([request])]
            answer.data = {"requests": stand}
            answer.table(stand, ("step", "stands", "test"))
            return
        folder = "onto" if clone is not None else pinned.name
        place = to or project.root / "export" / folder
        with elsewhere(place):
            exported = write_export(
                project,
                cache,
                pinned,
                place,
                Person.find(project, author),
                slugs=steps,
                clone=clone,
                bundle=bundle,
                assistant=assistant,
                bisect=bisect,
                packages=packages and packages.absolute(),
            )
    shown = [
        {
            "step": request.slug,
            "branch": request.branch if request.standing.series else "-",
            "stands": request.stands.replace("`", ""),
            "lines": request.lines,
        }
        for request in exported.requests
    ]
    answer.data = {
        "release": exported.state.release,
        "directory": str(exported.directory),
        "number": exported.state.number,
        "changed": exported.changed,
        "requests": shown,
        "conflicts": [
            {"branches": list(pair), "files": list(files)}
            for pair, files in exported.conflicts.items()
        ],
    }
    answer.table(shown, ("step", "branch", "stands", "lines"))
    word = "written to" if exported.changed else "unchanged in"
    answer.say(f"export {exported.state.number} {word} {exported.directory}")
    if exported.conflicts:
        answer.say(
            f"pairs that do not merge, though each stands alone:"
            f" {len(exported.conflicts)}, see cover.md"
        )
    if clone is not None and not bundle and exported.state.branches:
        *_, branch = exported.state.branches
        answer.say(
            f"next: git -C {clone.place} log -p {branch}, then read"
            f" {exported.directory}/cover.md"
        )
