# SPDX-License-Identifier: Apache-2.0
"""The order of the rows of all records."""

from collections.abc import Callable, Iterable, Mapping

from stack.base.releases import load
from stack.core.project import Project

Row = Mapping[str, object]


def newest_first(
    project: Project, rows: Iterable[Row], within: Callable[[Row], tuple[int, ...]]
) -> list[Row]:
    """The rows of pinned releases by release, the newest first, then by `within`."""
    place = {name: n for n, name in enumerate(reversed(load(project).names))}
    return sorted(
        (row for row in rows if row["release"] in place),
        key=lambda row: (place[str(row["release"])], *within(row)),
    )
