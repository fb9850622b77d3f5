# SPDX-License-Identifier: Apache-2.0
"""`xpustack rederive`: record the trees of a series that was edited by hand."""

from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.base.store import Store
from xpustack.core.cache import atomic_file
from xpustack.core.errors import StackError, UsageError
from xpustack.core.project import Project
from xpustack.series.apply import trees
from xpustack.series.recorded import format_trees, read_trees, trees_file
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)
from xpustack.terminal.selection import AllReleases


def rederive(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Such as v0.22.1.", metavar="[RELEASE]..."),
    ] = None,
    all_: AllReleases = False,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Apply a series anew, and record the tree of each step.

    For an edit of a patch, an overlay file, a kernel or the order that was not made by
    `save`. A release whose series does not apply keeps its record."""
    with answering("rederive", as_json) as answer:
        changed: dict[str, list[str]] = {}
        with showing_progress() as progress, using_cache() as cache:
            project = Project.find()
            pinned = releases.load(project)
            if bool(names) is all_:
                raise UsageError(
                    "name a release, or say --all", hint="xpustack rederive --help"
                )
            for release in pinned if all_ else [pinned[name] for name in names or ()]:
                try:
                    series = trees(
                        Store(cache),
                        project,
                        release,
                        offline=offline,
                        progress=progress,
                        recorded=False,
                    )
                except StackError as error:
                    answer.fail(error)
                    continue
                place = trees_file(project, release.name)
                text = format_trees(series.steps)
                before = place.read_bytes() if place.exists() else b""
                if text == before:
                    continue
                ids = read_trees(project, release.name) if before else {}
                with atomic_file(place) as file:
                    file.write(text)
                changed[release.name] = [
                    tree.slug
                    for tree in series.steps
                    if ids.get(tree.slug) != tree.tree_id
                ]
        answer.data = {"changed": changed}
        for name, slugs in changed.items():
            first = f"from {slugs[0]} on: {len(slugs)}" if slugs else "in another order"
            answer.say(f"{name}: trees recorded {first}")
        if not changed and not answer.errors:
            answer.say("every recorded tree is right")
