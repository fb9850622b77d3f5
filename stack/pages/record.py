# SPDX-License-Identifier: Apache-2.0
"""A record of runs, a row for each, and the page made of it: written together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stack.core import markdown
from stack.core.cache import atomic_file
from stack.core.project import Project
from stack.core.rows import csv_text


def write(
    project: Project,
    data: str,
    rows: Sequence[Mapping[str, object]],
    page: str,
    section: tuple[str, str],
    heads: Sequence[str] = (),
) -> None:
    """Write the rows to the file `data`, and a section of `page`: its name and content.

    Args:
        heads: columns that the file has without a row, too.

    Raises:
        UsageError: the page has no such section; nothing is written then.
    """
    place = project.root / page
    whole = markdown.with_section(place, *section)
    write_files({project.root / data: csv_text(rows, heads), place: whole})


def write_files(texts: Mapping[Path, str]) -> None:
    """Write files in this order, each atomically."""
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(text.encode())
