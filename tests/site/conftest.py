# SPDX-License-Identifier: Apache-2.0
"""The built site. `tox -e site` builds it first; `--site` names another folder."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", default=str(ROOT / "build/site"), help="the built site")


@pytest.fixture(scope="session")
def site(pytestconfig: pytest.Config) -> Path:
    folder = Path(pytestconfig.getoption("--site")).absolute()
    assert (folder / "index.html").is_file(), f"{folder}: tox -e site builds it"
    return folder
