# SPDX-License-Identifier: Apache-2.0
"""Build the site with Sphinx from the repository's pages and the pages of data."""

import base64
import html
import importlib.resources
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stack.base import releases
from stack.core.cache import Cache, replace_dir
from stack.core.errors import CheckFailed, EnvironmentProblem
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages.defects import LIST, defects, fixed, verdict
from stack.pages.status import StepStatus, cell, checked_statuses, matrix

if TYPE_CHECKING:
    from stack.pages.site.charts import Chart

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FILES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "NOTICE")
_HERE = Path(__file__).parent
"""With Sphinx's settings, the table of contents, and what the pages load."""
TABLES = sorted(_HERE.glob("tables/*.md"))
"""The pages of data, without the data."""
FOLDER = "docs/data"
GRID = "<!-- grid -->"
"""Stands in a page for the grid of that name."""
LINE = re.compile(rf"^(All rows: \[(.+\.csv)\]\({FOLDER}/\2\)\.)$", re.MULTILINE)
"""The line behind which a page has a file's rows, and before which its charts."""


def build_site(project: Project, cache: Cache, to: Path) -> int:
    """Build the site into a folder, atomically.

    Returns:
        The number of pages.

    Raises:
        EnvironmentProblem: Sphinx or another package of the group `pages` is
            missing.
        CheckFailed: a page has a link that leads nowhere, or other faults.
    """
    try:
        from sphinx.application import Sphinx
        from sphinx.errors import SphinxError

        from stack.pages.site.charts import CHARTS

        tables = importlib.resources.files("itables") / "html"
    except ImportError as error:
        raise EnvironmentProblem(
            f"the site needs {error.name}", hint="tox -e site"
        ) from None
    with cache.scratch() as work, replace_dir(to.absolute()) as target:
        source, log = work / "source", work / "log"
        shutil.copytree(project.root / "docs", source / "docs")
        for name in _FILES:
            shutil.copy(project.root / name, source / name)
        index = (project.root / "README.md").read_text("utf-8")
        index += (_HERE / "contents.md").read_text("utf-8")
        (source / "index.md").write_text(index, "utf-8")
        cache.progress("reading the series")
        pinned = releases.load(project)
        statuses = checked_statuses(project, cache, pinned)
        grids = {
            "steps": steps_grid(statuses, pinned.names),
            "defects": defects_grid(project, pinned.names, statuses),
        }
        for page in TABLES:
            text = page.read_text("utf-8").replace(GRID, grids.get(page.stem, ""))
            for line, file in LINE.findall(text):
                rows = read_rows(project.root / FOLDER / file)
                shown = [line, table(list(rows[0]), (row.values() for row in rows))]
                if file in CHARTS:
                    shown.insert(0, _pictures(CHARTS[file](rows), source, file))
                text = text.replace(line, "\n\n".join(shown))
            (source / page.name).write_text(text, "utf-8")
        shutil.copy(_HERE / "conf.py", source)
        static = shutil.copytree(_HERE / "static", source / "static")
        # Browsers load no modules from a disk, and DataTables is one.
        bundle = base64.b64encode((tables / "dt_bundle.js").read_bytes()).decode()
        (static / "datatables.js").write_text(
            f'window.dataTables = import("data:text/javascript;base64,{bundle}");\n'
        )
        (static / "datatables.css").write_bytes((tables / "dt_bundle.css").read_bytes())
        cache.progress("building the pages")
        with open(log, "w") as warnings:
            try:
                Sphinx(
                    source,
                    source,
                    target,
                    work / "doctrees",
                    "html",
                    status=None,
                    warning=warnings,
                ).build()
            except SphinxError as error:
                raise CheckFailed(
                    "the site cannot be built", detail=str(error)
                ) from None
        faults = _COLOUR.sub("", log.read_text()).replace(f"{source}/", "")
        if faults:
            raise CheckFailed("the pages have faults", detail=faults.splitlines()[:40])
        for name in (".buildinfo", "objects.inv"):
            (target / name).unlink(missing_ok=True)
        return len(list(target.rglob("*.html")))


def _pictures(drawn: "Iterable[Chart]", source: Path, file: str) -> str:
    """The charts of a file of rows, written beside the pages."""
    pictures = []
    for number, chart in enumerate(drawn):
        name = f"{Path(file).stem}-{number}.svg"
        (source / name).write_text(chart.svg(), "utf-8")
        pictures.append(f"![{chart.title}]({name})")
    return "\n".join(pictures)


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table, which the reader's browser makes sortable. Its cells are text with
    code in backticks; nothing else is read as Markdown."""
    lines = [
        f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    ]
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    return "\n".join(
        [
            f'<div class="table-wrapper"><table><thead><tr>{head}</tr></thead><tbody>',
            *lines,
            "</tbody></table></div>",
        ]
    )


def steps_grid(statuses: Sequence[StepStatus], names: Sequence[str]) -> str:
    """Steps by release, each with its checks, size and status upstream."""
    return table(
        ("step", *names),
        (
            (f"`{slug}`", *(cell(status) if status else "" for status in row))
            for slug, row in matrix(statuses, names)
        ),
    )


def defects_grid(
    project: Project, names: Sequence[str], statuses: Sequence[StepStatus]
) -> str:
    """Defects by release: broken, fixed by a step, or absent; then how many are fixed,
    as in the README."""
    listed = defects(project) if (project.root / LIST).is_file() else ()
    has = {(status.release, status.step) for status in statuses}
    rows = [
        (one.id, one.what, f"`{one.step}`", *(verdict(one, n, has) for n in names))
        for one in listed
    ]
    counts = (str(len(fixed(listed, name, has))) for name in names)
    rows.append(("", "defects fixed; one id is one defect", "", *counts))
    return table(("id", "defect", "step", *names), rows)


def _inline(text: str) -> str:
    """Code in tags; a long path may break after a slash."""
    return re.sub(
        r"`([^`]*)`",
        lambda code: f"<code>{code[1].replace('/', '/<wbr>')}</code>",
        html.escape(text.replace("\n", " ")),
    )
