# SPDX-License-Identifier: Apache-2.0
"""`xpustack site`: the pages as a static site."""

from pathlib import Path

from xpustack.pages.site.build import build_site
from xpustack.terminal.console import Reply, working


def site(*, to: Path = Path("build/site"), answer: Reply) -> None:
    """Build the pages, with sortable tables and charts, for a browser without a
    network. Open index.html of the folder.

    Args:
        to: The folder to write.
    """
    with working() as work:
        pages = build_site(work.project, work.cache, to)
    answer.data = {"directory": str(to.absolute()), "pages": pages}
    answer.say(f"{pages} pages in {to}")
