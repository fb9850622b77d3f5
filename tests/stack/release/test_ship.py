# SPDX-License-Identifier: Apache-2.0
"""Building a release: the folder appears complete or not at all, however it fails."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from children import start_tool
from shipped_stack import ShippedStack
from tiny_stack import BASE

from stack.core.errors import CheckFailed, EnvironmentProblem, UsageError
from stack.release.ship import COMPANION_FILES, IMAGE, OFFICIAL_IMAGE

IMAGES = (IMAGE, OFFICIAL_IMAGE)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_folder_holds_the_wheel_and_all_beside_it(shipped: ShippedStack):
    folder = shipped.root / "dist/v1.0"
    [wheel] = folder.glob("*.whl")
    assert left(folder) == sorted([wheel.name, *COMPANION_FILES])
    assert all(f" {wheel.name} " in (folder / name).read_text() for name in IMAGES)


def test_the_command_line_builds_and_says_what(shipped: ShippedStack, tmp_path: Path):
    words = ("build", "v1.0", "--to", str(tmp_path), "--offline")
    done = shipped.run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"v1.0: vllm 1.0+xpu.dsv4.1 in {tmp_path}/v1.0\n")
    answer = json.loads(shipped.run(*words, "--json").stdout)
    assert answer["errors"] == []
    [built] = answer["data"]["built"]
    assert left(tmp_path / "v1.0") == sorted(built["files"])
    for name, digest in built["files"].items():
        assert f"{digest}  {name}" in done.stdout
    assert left(tmp_path) == ["v1.0"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("build", "v1.1"), "did you mean v1.0?"),
        (("build",), "name one RELEASE"),
        (("build", "v1.0", "--all"), "name one RELEASE"),
    ],
)
def test_a_wrong_word_is_explained(shipped: ShippedStack, words, text: str):
    done = shipped.run(*words)
    assert (done.returncode, text in done.stderr) == (2, True), done.stderr


def test_a_folder_with_other_files_is_not_touched(
    shipped: ShippedStack, tmp_path: Path
):
    (tmp_path / "v1.0").mkdir()
    (tmp_path / "v1.0" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="was not made by xpustack build"):
        shipped.ship(tmp_path)
    assert left(tmp_path / "v1.0") == ["thesis.txt"]


def test_a_file_in_the_way(shipped: ShippedStack, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="a file is where a directory"):
        shipped.ship(tmp_path / "file")
    with pytest.raises(EnvironmentProblem, match="a file is where a directory"):
        shipped.ship(tmp_path / "file" / "below")


def test_a_release_without_steps_is_not_handed_out(
    shipped: ShippedStack, tmp_path: Path
):
    stack = shipped.copy(tmp_path / "stack")
    shutil.rmtree(stack.project.series_dir("v2.0"))
    with pytest.raises(UsageError, match="no steps yet"):
        stack.ship(tmp_path / "dist", "v2.0")
    assert left(tmp_path / "dist") == []


def test_a_directory_that_may_not_be_written(shipped: ShippedStack, small_disk: Path):
    again = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(again, check=True, capture_output=True)
    with pytest.raises(EnvironmentProblem, match="not allowed to write"):
        shipped.ship(small_disk)


def test_a_full_disk(shipped: ShippedStack, small_disk: Path):
    """Full when the files are written, which is long after the start."""
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - 12_288))
    with pytest.raises(EnvironmentProblem, match="the disk is full") as caught:
        shipped.ship(small_disk)
    assert str(small_disk) in (caught.value.path or "")
    assert left(small_disk) == ["filler"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_and_keeps_what_was(
    shipped: ShippedStack, tmp_path: Path, number: int
):
    stack = shipped.copy(tmp_path / "stack")
    before = left(stack.root / "dist/v1.0")
    mark = tmp_path / "started"
    script = f"import time\nopen({str(mark)!r}, 'w').close()\ntime.sleep(60)\n"
    stack.step("sleep", {"setup.py": script + BASE["setup.py"]})
    words = ["build", "v1.0", "--offline", "--to", str(stack.root / "dist")]
    child = start_tool(words, stack.project.root, stack.environment, number)
    until = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.05)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=30)
    assert (child.returncode, "nothing half-done" in stderr) == (130, True), stderr
    assert left(stack.root / "dist") == ["v1.0"]
    assert left(stack.root / "dist/v1.0") == before
    assert left(stack.cache.root / "scratch") == []


def test_a_missing_compiler_is_named(
    shipped: ShippedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stack = shipped.copy(tmp_path / "stack")
    stack.with_extension()
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, str(tmp_path / "no-compiler"))
    with pytest.raises(EnvironmentProblem, match=r"no C\+\+ compiler"):
        stack.ship(tmp_path / "dist")
    assert left(tmp_path / "dist") == []


def test_a_wheel_that_names_this_machine_is_not_handed_out(
    shipped: ShippedStack, tmp_path: Path
):
    stack = shipped.copy(tmp_path / "stack")
    script = "import os\nopen('vllm/leak.py', 'w').write(os.getcwd())\n"
    stack.step("leak", {"setup.py": script + BASE["setup.py"]})
    with pytest.raises(CheckFailed, match="directories of this machine") as caught:
        stack.ship(tmp_path / "dist")
    assert caught.value.detail[0].startswith("vllm/leak.py names ")
    assert left(tmp_path / "dist") == []


def test_an_older_folder_is_replaced_whole(shipped: ShippedStack, tmp_path: Path):
    old = tmp_path / "v1.0" / "vllm-1.0+xpu.dsv4.0-py3-none-any.whl"
    old.parent.mkdir()
    old.write_bytes(b"")
    artifacts = shipped.ship(tmp_path)
    assert left(artifacts.directory) == sorted(artifacts.files)
    assert left(tmp_path) == ["v1.0"]
    assert os.stat(artifacts.directory).st_mode & 0o777 == 0o755
