# SPDX-License-Identifier: Apache-2.0
"""Build the site with Sphinx from the repository's pages and the pages of data."""

import base64
import importlib.resources
import re
import shutil
from pathlib import Path

from xpustack.base import releases
from xpustack.core.cache import Cache, replace_dir
from xpustack.core.errors import CheckFailed, EnvironmentProblem
from xpustack.core.project import Project
from xpustack.pages.status import checked_statuses

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FILES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "NOTICE")
_HERE = Path(__file__).parent
"""With Sphinx's settings, the table of contents, and what the pages load."""


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

        from xpustack.pages.site.data import write_pages

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
        write_pages(project, pinned, checked_statuses(project, cache, pinned), source)
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
