# SPDX-License-Identifier: Apache-2.0
"""`bin/xpustack`: it finds the environment, makes it, or says how."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOOR = "bin/xpustack"
TOX = """\
#!/bin/sh
echo "tox $*" >> "$LOG"
[ -n "$MAKES" ] || exit 1
case "$*" in *"-e build "*) folder=build ;; *) folder=shared ;; esac
mkdir -p .tox/$folder/bin; cp "$MAKES" .tox/$folder/bin/python
"""
PYTHON = """\
#!/bin/sh
case "$1" in -c) exit 0 ;; esac
echo "$PYTHONPATH: $*"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with nothing but the front door, and a `tox` that notes its calls."""
    folder = tmp_path / "a checkout"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(ROOT / DOOR, folder / DOOR)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("tox", TOX), ("made", PYTHON)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return folder


def call(
    checkout: Path, *words: str, tox: bool = True, makes: bool = True
) -> subprocess.CompletedProcess[str]:
    programs = checkout.parent / "programs"
    variables = {
        "PATH": f"{programs}:/usr/bin:/bin" if tox else "/usr/bin:/bin",
        "LOG": str(checkout.parent / "log"),
        "MAKES": str(programs / "made") if makes else "",
    }
    return subprocess.run(
        [str(checkout / DOOR), *words],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
    )


def test_the_first_call_makes_the_environment_and_the_second_does_not(checkout: Path):
    log = checkout.parent / "log"
    done = call(checkout, "plan", "a b")
    assert (done.returncode, done.stdout) == (
        0,
        f"{checkout}: -m xpustack plan a b\n",
    ), done.stderr
    assert "making its environment" in done.stderr
    assert log.read_text() == f"tox run -c {checkout} -e apply-and-test --notest\n"
    for command in ("status", "build"):
        done = call(checkout, command, tox=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_build_makes_the_small_environment(checkout: Path):
    for command in ("build", "verify"):
        assert call(checkout, command, "x").returncode == 0
    log = checkout.parent / "log"
    assert log.read_text() == f"tox run -c {checkout} -e build --notest\n"
    assert call(checkout, "plan", tox=False).returncode == 5


def test_without_tox_it_says_what_to_install(checkout: Path):
    done = call(checkout, "status", tox=False)
    assert done.returncode == 5
    assert "next: python3 -m pip install tox" in done.stderr


def test_an_environment_that_was_not_made_is_said(checkout: Path):
    done = call(checkout, "status", makes=False)
    assert done.returncode == 5
    assert f"next: tox run -c {checkout} -e apply-and-test --notest" in done.stderr


def test_it_runs_from_any_folder_and_through_a_link(tmp_path: Path):
    """The real one, by the Python of these tests."""
    (tmp_path / ".tox/shared/bin").mkdir(parents=True)
    python = tmp_path / ".tox/shared/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / DOOR, tmp_path / DOOR)
    for name in ("stack", "xpustack", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / DOOR)
    done = subprocess.run(
        [str(link), "--version"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("xpustack ")
