# SPDX-License-Identifier: Apache-2.0
"""Texts that programs write: of a template, and Markdown's tables and the generated
section of a page.

tabulate writes such tables too, but does not escape a `|` in a cell: not worth a
dependency.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stack.core.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment


def rendered(package: str, name: str, values: Mapping[str, object]) -> str:
    """The text of the template `name.jinja` beside a package's code, with one line feed
    at its end. A line that holds a statement alone leaves none; the filter `cell`
    escapes what would end a cell of a table."""
    template = _templates(package).get_template(f"{name}.jinja")
    return template.render(values).rstrip("\n") + "\n"


@functools.cache
def _templates(package: str) -> "Environment":
    # Most commands write no text, so they need not import the library.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["cell"] = _cell
    return environment


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table without a line feed at its end. What would end a cell is escaped."""
    lines = [_line(heads), "|---" * len(heads) + "|"]
    return "\n".join([*lines, *map(_line, rows)])


def with_section(page: Path, name: str, content: str) -> str:
    """The text of `page` with `content` as its section `name`: what lies between the
    lines `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Raises:
        UsageError: there is no such page, or it has no such section.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    text = page.read_text("utf-8") if page.is_file() else ""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UsageError(
            f"the page has no section {name}",
            path=page,
            hint=f"add the lines {begin.strip()} and {end} to {page.name}",
        )
    return f"{before}{begin}{content}\n{end}{after}"


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(content: object) -> str:
    """The content of a table's cell, in which nothing ends it."""
    return str(content).replace("|", r"\|").replace("\n", " ")
