# SPDX-License-Identifier: Apache-2.0
"""`xpustack cache`: list what the cache holds, and clean it up."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.filesize import decimal

from stack.builds import cache_contents
from stack.builds.cache_contents import Area
from stack.core.cache import Cache
from stack.terminal.console import Answer, Reply, plain_number, showing_progress

Days = Annotated[float, Parameter(converter=plain_number, validator=Number(gte=0))]


def info(*, answer: Reply) -> None:
    """Show where the cache lies and what it holds."""
    cache = Cache.default()
    with showing_progress() as progress:
        areas = cache_contents.info(cache, progress)
    _report(answer, cache, areas)


def gc(*, days: Days = 7, answer: Reply) -> None:
    """Remove what nobody used lately, and what killed runs left.

    Everything removed can be made or downloaded again; `--days 0` removes all. Refused
    while another command uses the cache (exit code 5).

    Args:
        days: Keep what was made or used since then.
    """
    cache = Cache.default()
    with showing_progress() as progress:
        before = _bytes(cache_contents.info(cache, progress))
        cache_contents.gc(cache, days=days)
        areas = cache_contents.info(cache, progress)
    _report(answer, cache, areas, before=before)
    answer.say(f"freed {decimal(before - _bytes(areas))}")


def _report(
    answer: Answer, cache: Cache, areas: Sequence[Area], **more: object
) -> None:
    total = _bytes(areas)
    answer.data = {
        "cache": str(cache.root),
        "bytes": total,
        "areas": areas,
        **more,
    }
    rows = [
        {"area": area.name, "entries": area.entries, "size": decimal(area.bytes)}
        for area in areas
    ]
    answer.table(rows, ("area", "entries", "size"))
    answer.say(f"{cache.root}: {decimal(total)}")


def _bytes(areas: Sequence[Area]) -> int:
    return sum(area.bytes for area in areas)
