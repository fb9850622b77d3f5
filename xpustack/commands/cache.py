# SPDX-License-Identifier: Apache-2.0
"""`xpustack cache`: list what the cache holds, and clean it up."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer

from xpustack.checks import cache_contents
from xpustack.checks.cache_contents import Area
from xpustack.core.cache import Cache
from xpustack.core.project import Project
from xpustack.terminal.console import Answer, AsJson, answering, showing_progress

_UNITS = ("B", "kB", "MB", "GB")


def info(as_json: AsJson = False) -> None:
    """Show where the cache lies and what it holds."""
    with answering("cache info", as_json) as answer:
        cache = Cache.default()
        areas = cache_contents.info(cache)
        _report(answer, cache, areas)
        answer.say(f"{cache.root}: {_size(areas)}")


def gc(
    days: Annotated[
        float, typer.Option(min=0, help="Keep what was made or used since then.")
    ] = 7,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what no pin and no series of this checkout needs, and what killed runs
    left.

    Everything removed can be made or downloaded again. Refused while another command
    uses the cache (exit code 5)."""
    with answering("cache gc", as_json) as answer:
        cache = Cache.default()
        with showing_progress() as progress:
            needed = cache_contents.needs(Project.find(), cache, progress)
            areas = cache_contents.gc(cache, needed, days=days, dry_run=dry_run)
        _report(answer, cache, areas)
        answer.say(f"{'would free' if dry_run else 'freed'} {_size(areas)}")


def _report(answer: Answer, cache: Cache, areas: Sequence[Area]) -> None:
    answer.data = {
        "cache": str(cache.root),
        "bytes": sum(area.bytes for area in areas),
        "areas": [dataclasses.asdict(area) for area in areas],
    }
    rows = [
        {"area": area.name, "entries": area.entries, "size": _size([area])}
        for area in areas
    ]
    answer.table(rows, ("area", "entries", "size"))


def _size(areas: Sequence[Area]) -> str:
    size = float(sum(area.bytes for area in areas))
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} {_UNITS[-1]}"
