# SPDX-License-Identifier: Apache-2.0
"""The built site: that in the folder of `--site`, else one that is built here."""

from pathlib import Path

import pytest

from stack.core.cache import Cache
from stack.core.errors import CheckFailed
from stack.core.project import Project
from stack.pages.site.build import build_site

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", help="the built site; without it, one is built")
    parser.addoption("--screenshots", help="a folder for a picture of every page")


@pytest.fixture(scope="session")
def site(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := pytestconfig.getoption("--site"):
        folder = Path(given).absolute()
        assert (folder / "index.html").is_file(), f"{folder}: tox -e site builds it"
        return folder
    work = tmp_path_factory.mktemp("site")
    try:
        build_site(Project(ROOT), Cache(work / "cache"), work / "site")
    except CheckFailed as refused:
        pytest.fail(f"tox -e site refuses the pages\n{refused}", pytrace=False)
    return work / "site"
