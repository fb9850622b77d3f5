# SPDX-License-Identifier: Apache-2.0
"""`install.sh` beside a wheel: what it installs in which order, and how it ends."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from made import ONEAPI, read, text
from tiny_stack import DOCKERFILE

from stack.base.releases import Release
from stack.release import pinned
from stack.release.runtime import Runtime
from stack.release.ship import INSTALL

STUB = """\
#!/bin/sh
case "$*" in
    "-c "*) exit "$BASE" ;;
    *"$FAILS"*) echo "no such thing" >&2; exit 1 ;;
esac
echo "$*" >> "$LOG"
"""
"""A Python that notes how it was called."""


def install(
    folder: Path, release: Release, here: Runtime, base: int = 0, fails: str = "nothing"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script of a release with that runtime; the calls of its Python."""
    release_folder = folder / "dist of mine"
    release_folder.mkdir()
    (release_folder / INSTALL).write_text(text(INSTALL, release, here))
    python, log = folder / "python", folder / "log"
    python.write_text(STUB)
    python.chmod(0o755)
    log.touch()
    done = subprocess.run(
        ["sh", f"{release_folder.name}/{INSTALL}", "./python"],
        cwd=folder,
        env={**os.environ, "LOG": str(log), "BASE": str(base), "FAILS": fails},
        capture_output=True,
        text=True,
    )
    calls = log.read_text().replace(f"{release_folder}/", "").splitlines()
    return done, calls


def with_one_hash(here: Runtime) -> Runtime:
    first, *rest = here.pins
    return replace(here, pins=(replace(first, hashes=("0" * 64,)), *rest))


def test_what_has_hashes_comes_first_and_the_runtime_last(
    release: Release, tmp_path: Path
):
    here = with_one_hash(read(DOCKERFILE, release))
    done, calls = install(tmp_path, release, here)
    assert done.returncode == 0, done.stderr
    index = "--extra-index-url https://wheels.example.org/xpu "
    assert sum(index in call for call in calls) == 4
    assert [call.replace(index, "").removeprefix("-m pip ") for call in calls] == [
        "install --no-deps --require-hashes --requirement pins.txt",
        "install --constraint constraints.txt x.whl",
        "uninstall --yes triton triton-xpu",
        f"install --no-deps {here.pins[1].requirement}",
        "uninstall --yes oneccl",
        "install --requirement runtime.txt",
        "pinned.py oneccl",
    ]


def test_what_a_release_does_not_name_is_left_out(release: Release, tmp_path: Path):
    """A oneCCL that is no package is left to the user, and said."""
    here = read(ONEAPI, release)
    done, calls = install(tmp_path, release, here)
    assert done.returncode == 0, done.stderr
    assert not any("pins.txt" in call or "runtime.txt" in call for call in calls)
    assert f"takes oneCCL from {here.installer}" in done.stdout
    assert "LD_LIBRARY_PATH=/opt/intel/oneapi/ccl/9.1/lib" in done.stdout


@pytest.mark.parametrize(
    "word", ["constraints.txt", "triton==", "runtime.txt", "pinned"]
)
def test_the_first_failure_ends_it(release: Release, tmp_path: Path, word: str):
    done, calls = install(tmp_path, release, read(DOCKERFILE, release), fails=word)
    assert done.returncode == 1
    assert done.stderr.endswith("vllm is not installed; see the lines above\n")
    assert not any(word in call for call in calls)


def test_a_python_of_the_system_is_not_touched(release: Release, tmp_path: Path):
    done, calls = install(tmp_path, release, read(DOCKERFILE, release), base=1)
    assert (done.returncode, calls) == (2, [])
    assert "next: python3.12 -m venv" in done.stderr


def test_every_shell_understands_it(release: Release, tmp_path: Path):
    file = tmp_path / INSTALL
    file.write_text(text(INSTALL, release, with_one_hash(read(ONEAPI, release))))
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    """A folder that pins pytest as it is installed here."""
    (tmp_path / "constraints.txt").write_text(
        f"# a comment: torch==0\npytest=={pytest.__version__}\n"
    )
    (tmp_path / "runtime.txt").write_text(f"# nothing==0\nrich=={version_of('rich')}\n")
    return tmp_path


def test_the_last_check_finds_another_version(pins: Path):
    assert pinned.problems(pins, ["oneccl"]) == []
    (pins / "runtime.txt").write_text("rich==0.1\nabsent==1\n")
    assert pinned.problems(pins, []) == [
        f"rich is {version_of('rich')}, not 0.1",
        "absent is missing, not 1",
    ]


def test_the_last_check_finds_what_should_be_gone(pins: Path):
    assert pinned.problems(pins, ["rich"]) == ["rich is still there"]


def test_the_last_check_ends_a_script(pins: Path):
    program = Path(pinned.__file__).read_text()
    (pins / "pinned.py").write_text(program)
    command = [sys.executable, str(pins / "pinned.py")]
    assert subprocess.run(command).returncode == 0
    done = subprocess.run([*command, "rich"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "rich is still there\n")
