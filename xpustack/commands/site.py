# SPDX-License-Identifier: Apache-2.0
"""`xpustack site`: the pages as a static site."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.core.project import Project
from xpustack.pages.site.build import build_site
from xpustack.terminal.console import AsJson, answering, showing_progress, using_cache


def site(
    to: Annotated[Path, typer.Option(help="The folder to write.")] = Path("build/site"),
    as_json: AsJson = False,
) -> None:
    """Build the pages, with sortable tables and charts, for a browser without a
    network. Open index.html of the folder."""
    with answering("site", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            pages = build_site(Project.find(), cache, to, progress)
        answer.data = {"directory": str(to.absolute()), "pages": pages}
        answer.say(f"{pages} pages in {to}")
