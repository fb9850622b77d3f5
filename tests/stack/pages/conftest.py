# SPDX-License-Identifier: Apache-2.0
"""What the tests of pages share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stack.core.project import Project

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project_with(tmp_path: Path) -> Callable[[str, str], Project]:
    """Makes a project with this repository's releases and one page, which has one
    empty section."""

    def make(page: str, section: str) -> Project:
        (tmp_path / "docs/data").mkdir(parents=True)
        for name in ("releases.toml", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
        (tmp_path / page).write_text(f"# Page\n{begin}\n{end}\n")
        return Project(tmp_path)

    return make
