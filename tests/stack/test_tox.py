# SPDX-License-Identifier: Apache-2.0
"""tox environments that need the same packages share one folder and keep it."""

import configparser
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """\
[tox]
env_list = first, second

[testenv]
skip_install = true
runner = shared
env_dir = {work_dir}/shared
commands = python -c "import sys; print('ran in', sys.prefix)"
"""


def test_the_shared_folder_is_made_once(tmp_path: Path) -> None:
    """tox's own runner makes it anew for each name."""
    (tmp_path / "tox.ini").write_text(SETTINGS)
    shutil.copy(ROOT / "toxfile.py", tmp_path)
    environment = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "TMPDIR")
        if name in os.environ
    }

    def tox(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tox", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert "ran in" in done.stdout
        return done.stdout

    output = tox() + tox("-e", "second") + tox("-e", "first")
    assert "recreate env" not in output


def test_what_shows_results_of_checks_has_the_packages_of_the_checks() -> None:
    """A stored result counts for the packages that made it."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for name in ("steps", "apply-and-test", "site", "export"):
        own = {"env_dir", "deps", "dependency_groups", "package", "runner"}
        assert not own & set(tox[f"testenv:{name}"]), name


def test_a_build_installs_no_more_than_it_needs() -> None:
    """The tool and what compiles: nothing that tests, lints or serves."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    own = tox["testenv:build"]
    assert own["dependency_groups"] == "build"
    assert own["env_dir"] != tox["testenv"]["env_dir"]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert "torch" in groups["build"]
    assert not {"sphinx", "mypy", "transformers", "triton"} & set(groups["build"])
