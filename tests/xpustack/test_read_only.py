# SPDX-License-Identifier: Apache-2.0
"""Places that cannot be written: what is said of them is true, and the next command
works."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls import Call, calling
from fake_stack import FakeStack, commit

from stack.core.project import Project
from stack.series.staging import require_writable

CACHE_MOVES = "XPUSTACK_CACHE=DIR moves the cache"


@pytest.fixture
def call(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    return calling(stack, monkeypatch)


@pytest.fixture
def checkout(
    stack: FakeStack, small_disk: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The stack's project on a disk that is mounted read-only, where commands are
    called."""
    place = shutil.copytree(stack.project.root, small_disk / "project")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    monkeypatch.chdir(place)
    yield place
    monkeypatch.chdir(stack.root)


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (("build", "v1.0", "--offline"), "dist/v1.0"),
        (("build", "--offline", "--to", "out", "v1.0"), "out/v1.0"),
        (("site",), "build/site"),
        (("site", "--to=pages"), "pages"),
        (("apply", "v1.0", "--to", "work"), "work"),
    ],
    ids=" ".join,
)
def test_another_folder_is_next(
    checkout: Path, call: Call, words: tuple[str, ...], target: str
) -> None:
    done = call(*words)
    assert done.exit_code == 5, done.output
    assert "not allowed to write" in done.stderr
    assert f"file: {checkout / target}\n" in done.stderr
    (hint,) = (line for line in done.stderr.splitlines() if "next: " in line)
    assert hint.endswith("--to DIR") and hint.count("--to") == 1
    assert CACHE_MOVES not in done.stderr


def test_the_next_command_works(checkout: Path, call: Call, tmp_path: Path) -> None:
    done = call("apply", "v1.0", "--to", "work")
    line = done.stderr.partition("next: xpustack ")[2].strip()
    assert call(*line.replace("DIR", str(tmp_path / "there")).split()).exit_code == 0
    assert (tmp_path / "there/vllm/attention.py").is_file()


def test_save_changes_nothing_and_says_so(
    checkout: Path, stack: FakeStack, call: Call
) -> None:
    work = stack.apply()
    commit(work, "fourth", {"vllm/windows.py": "other\n"})
    done = call("save", work)
    assert done.exit_code == 5, done.output
    assert "nothing was changed: the checkout cannot be written" in done.stderr
    assert f"cp -r {checkout} COPY, then the same command in COPY" in done.stderr
    assert "also changed" not in done.output and CACHE_MOVES not in done.output
    # To look is allowed.
    dry = call("save", work, "--dry-run")
    assert dry.exit_code == 1
    assert dry.stdout.endswith("\na dry run: nothing was written\n")


def test_a_project_without_some_folder_can_be_written(tmp_path: Path) -> None:
    require_writable(Project(tmp_path))


@pytest.mark.parametrize("place", ["/proc/pages", "/proc/pages/site"])
@pytest.mark.parametrize("command", [("site",), ("apply", "v1.0")], ids=" ".join)
def test_a_place_where_no_folder_can_be_made(
    call: Call, command: tuple[str, ...], place: str
) -> None:
    done = call(*command, "--to", place)
    assert done.exit_code == 5, done.output
    assert f"error: no folder can be made there\n  file: {place}\n" in done.stderr
    assert f"next: xpustack {' '.join(command)} --to DIR\n" in done.stderr
    assert "pathlib" not in done.stderr and ".part" not in done.stderr


def test_a_file_on_the_way_is_not_to_be_moved(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("of somebody\n")
    done = call("site", "--to", file / "site")
    assert done.exit_code == 5, done.output
    assert "a file is where a directory must be" in done.stderr
    assert done.stderr.endswith("next: xpustack site --to DIR\n")


def test_a_cache_that_cannot_be_written_can_be_moved(
    stack: FakeStack, small_disk: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    monkeypatch.setenv("XPUSTACK_CACHE", str(small_disk / "cache"))
    done = call("apply", "v1.0")
    assert done.exit_code == 5, done.output
    assert CACHE_MOVES in done.stderr and str(small_disk) in done.stderr
