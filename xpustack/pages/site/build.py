# SPDX-License-Identifier: Apache-2.0
"""Build the site with Sphinx from the repository's pages and the generated ones."""

import base64
import importlib.resources
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from xpustack.base import releases
from xpustack.core.cache import Cache, replace_dir
from xpustack.core.errors import CheckFailed, EnvironmentProblem
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.pages.site import generated
from xpustack.pages.site.layer import layer_page
from xpustack.pages.site.listings import LISTINGS, listing_page
from xpustack.pages.site.reports import checkpoints_page, devices_page, report_pages
from xpustack.pages.status import checked_statuses

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
_FILES = ("LICENSE", "NOTICE")
_STATIC = Path(__file__).parent / "static"
_GROUPS = {
    "Data": (
        "steps",
        "layer",
        "defects",
        "engine",
        "serve",
        "capabilities",
        "checkpoints",
        "machine_code",
        "measurements",
        "xpu_path",
        "branches",
        "devices",
    ),
    "For deployers": (
        "docs/deploying",
        "docs/devices",
        "docs/capabilities",
        "docs/checkpoints",
        "docs/e2e",
    ),
    "Evidence": (
        "docs/steps",
        "docs/defects",
        "docs/kernels",
        "docs/layers",
        "docs/xpu_path",
        "docs/xpu_branches",
    ),
    "For contributors": (
        "CONTRIBUTING",
        "docs/upstreaming",
        "docs/decisions",
        "CHANGELOG",
        "SECURITY",
    ),
}
_SETTINGS = {
    "project": "DeepSeek-V4 on Intel XPU",
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "html_theme": "furo",
    "html_title": "DeepSeek-V4 on Intel XPU",
    "html_static_path": ["_static"],
    "html_css_files": ["datatables.css", "site.css"],
    "html_js_files": ["datatables.js", "tables.js"],
    "html_copy_source": False,
    "html_show_sourcelink": False,
    # Code blocks may quote fragments that a lexer cannot parse.
    "suppress_warnings": ["misc.highlighting_failure", "toc.not_included"],
}


def build_site(
    project: Project, cache: Cache, to: Path, progress: Progress = silent
) -> int:
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
    except ImportError as error:
        raise EnvironmentProblem(
            f"the site needs {error.name}", hint="tox -e site"
        ) from None
    with cache.scratch() as work, replace_dir(to.absolute()) as target:
        source = work / "source"
        _write_source(project, cache, source, progress)
        progress("building the pages")
        log = work / "log"
        with open(log, "w+") as warnings:
            try:
                Sphinx(
                    source,
                    None,
                    target,
                    work / "doctrees",
                    "html",
                    confoverrides=dict(_SETTINGS),
                    status=None,
                    warning=warnings,
                    freshenv=True,
                ).build()
            except SphinxError as error:
                raise CheckFailed(
                    "the site cannot be built", detail=str(error)
                ) from None
        text = _COLOUR.sub("", log.read_text())
        faults = text.replace(f"{source}/", "").splitlines()
        if faults:
            raise CheckFailed("the pages have faults", detail=faults[:40])
        for name in (".doctrees", ".buildinfo", "objects.inv"):
            place = target / name
            if place.is_file():
                place.unlink()
        return len(list(target.rglob("*.html")))


def _write_source(
    project: Project, cache: Cache, source: Path, progress: Progress
) -> None:
    """The pages as Sphinx reads them: those of the repository, and the generated."""
    shutil.copytree(project.root / "docs", source / "docs")
    for name in (*_PAGES, *_FILES):
        if (project.root / name).is_file():
            shutil.copy(project.root / name, source / name)
    progress("reading the series")
    pinned = releases.load(project)
    statuses = checked_statuses(project, cache, pinned)
    pages = {
        "steps": generated.steps_page(statuses, pinned.names),
        "defects": generated.defects_page(project, pinned, statuses),
        "machine_code": generated.machine_code_page(project),
        "measurements": generated.measurements_page(project),
        "layer": layer_page(statuses),
        **{name: listing_page(project, one) for name, one in LISTINGS.items()},
    }
    for name, page in (
        ("devices", devices_page(project)),
        ("checkpoints", checkpoints_page(project)),
    ):
        if page is not None:
            pages[name] = page
    for name, (text, files) in pages.items():
        (source / f"{name}.md").write_text(text, "utf-8")
        for file, content in files.items():
            (source / file).write_text(content, "utf-8")
    index = (project.root / "README.md").read_text("utf-8")
    contents = _contents(source, report_pages(project))
    (source / "index.md").write_text(index + contents, "utf-8")
    static = source / "_static"
    shutil.copytree(_STATIC, static)
    (static / "datatables.js").write_text(_bundle("dt_bundle.js"), "utf-8")
    css = _asset("dt_bundle.css").decode()
    (static / "datatables.css").write_text(css, "utf-8")


def _contents(source: Path, reports: Sequence[str]) -> str:
    """The table of contents, hidden on the page itself and shown beside every page."""
    groups = []
    for caption, pages in {**_GROUPS, "Reports of devices": reports}.items():
        names = [page for page in pages if (source / f"{page}.md").is_file()]
        groups.append(_toctree(caption, names))
    return "\n".join(["", *groups])


def _toctree(caption: str, names: Iterable[str]) -> str:
    lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]
    return "\n".join(lines)


def _bundle(name: str) -> str:
    """DataTables as a classic script: browsers load no modules from a disk."""
    data = base64.b64encode(_asset(name)).decode()
    return (
        'window.dataTables = import("data:text/javascript;charset=utf-8;base64,'
        + data
        + '");\n'
    )


def _asset(name: str) -> bytes:
    try:
        return (importlib.resources.files("itables") / "html" / name).read_bytes()
    except ModuleNotFoundError:
        raise EnvironmentProblem("the site needs itables", hint="tox -e site") from None
