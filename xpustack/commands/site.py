# SPDX-License-Identifier: Apache-2.0
"""`xpustack site`: the pages as a static site."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.pages.site.build import build_site
from xpustack.terminal.console import AsJson, answering, working


def site(
    to: Annotated[Path, typer.Option(help="The folder to write.")] = Path("build/site"),
    as_json: AsJson = False,
) -> None:
    """Build the pages, with sortable tables and charts, for a browser without a
    network. Open index.html of the folder."""
    with answering("site", as_json) as answer:
        with working() as work:
            pages = build_site(work.project, work.cache, to)
        answer.data = {"directory": str(to.absolute()), "pages": pages}
        answer.say(f"{pages} pages in {to}")
