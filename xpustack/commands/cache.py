# SPDX-License-Identifier: Apache-2.0
"""`xpustack cache`: list what the cache holds, and clean it up."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from xpustack.checks import cache_contents
from xpustack.checks.cache_contents import Area
from xpustack.core.cache import Cache
from xpustack.core.errors import UsageError
from xpustack.core.project import Project
from xpustack.terminal.console import Answer, AsJson, answering, showing_progress
from xpustack.terminal.report import size

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only report what would be removed.")
]


def main(
    context: typer.Context,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Remove everything that no pin and no series of this checkout reaches,"
            " however lately it was used.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Show the cache, or clean it up.

    `--prune` is for a full disk: other checkouts must make again what only they use.
    `gc` keeps what was used in the last days."""
    if context.invoked_subcommand is not None:
        if prune or dry_run:
            raise typer.BadParameter("`--prune` and `--dry-run` take no command")
        return
    if not prune:
        print(context.get_help())
        raise typer.Exit(UsageError.exit_code)
    with answering("cache --prune", as_json) as answer:
        cache = Cache.default()
        before = _bytes(cache_contents.info(cache))
        areas = _clean(answer, cache, days=0, dry_run=dry_run)
        removed = _bytes(areas)
        after = before - removed if dry_run else _bytes(cache_contents.info(cache))
        answer.data = {**_data(cache, areas), "before": before, "after": after}
        answer.say(f"{cache.root}: {size(before)} before, {size(after)} after")


def info(as_json: AsJson = False) -> None:
    """Show where the cache lies and what it holds."""
    with answering("cache info", as_json) as answer:
        cache = Cache.default()
        areas = cache_contents.info(cache)
        _report(answer, cache, areas)
        answer.say(f"{cache.root}: {size(_bytes(areas))}")


def gc(
    days: Annotated[
        float, typer.Option(min=0, help="Keep what was made or used since then.")
    ] = 7,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove what no pin and no series of this checkout needs, and what killed runs
    left.

    Everything removed can be made or downloaded again. Refused while another command
    uses the cache (exit code 5)."""
    with answering("cache gc", as_json) as answer:
        _clean(answer, Cache.default(), days=days, dry_run=dry_run)


def _clean(
    answer: Answer, cache: Cache, *, days: float, dry_run: bool
) -> Sequence[Area]:
    """Clean up, say what was removed, and return it."""
    with showing_progress() as progress:
        needed = cache_contents.needs(Project.find(), cache, progress)
        areas = cache_contents.gc(cache, needed, days=days, dry_run=dry_run)
    _report(answer, cache, areas)
    answer.say(f"{'would free' if dry_run else 'freed'} {size(_bytes(areas))}")
    return areas


def _report(answer: Answer, cache: Cache, areas: Sequence[Area]) -> None:
    answer.data = _data(cache, areas)
    rows = [
        {"area": area.name, "entries": area.entries, "size": size(area.bytes)}
        for area in areas
    ]
    answer.table(rows, ("area", "entries", "size"))


def _data(cache: Cache, areas: Sequence[Area]) -> dict[str, object]:
    return {
        "cache": str(cache.root),
        "bytes": _bytes(areas),
        "areas": [dataclasses.asdict(area) for area in areas],
    }


def _bytes(areas: Iterable[Area]) -> int:
    return sum(area.bytes for area in areas)
