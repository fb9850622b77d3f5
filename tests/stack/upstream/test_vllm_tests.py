# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests: which files name a module, and what their run says."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from stack.base.releases import load
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.upstream.vllm_tests import (
    BOTH,
    PLATFORMS,
    PROGRAM,
    Compared,
    Device,
    FileRun,
    compared,
    naming,
    rows_of,
    write_rows,
)
from xpustack.commands.upstream_tests import upstream_tests

FILES = {
    "tests/test_from.py": "from vllm.a.layer import x\n",
    "tests/test_package.py": "from vllm.a import layer\n",
    "tests/deep/test_plain.py": "import vllm.a.layer as y\n",
    "tests/test_text.py": "TARGET = 'vllm.a.layer.Kernel'\n",
    "tests/test_other.py": "from vllm.a.layers import x\n",
    "tests/helper.py": "from vllm.a.layer import x\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_files_that_import_or_name_a_module(tmp_path: Path) -> None:
    assert naming(write(tmp_path, FILES), ["vllm.a.layer"]) == [
        "tests/deep/test_plain.py",
        "tests/test_from.py",
        "tests/test_package.py",
        "tests/test_text.py",
    ]


OUTCOMES = """
import os, pytest, time

def test_passes(): pass
def test_changes(): assert os.environ["SIDE"] == "before"
@pytest.mark.skipif(True, reason="no GPU")
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
@pytest.mark.xfail
def test_known(): assert False
"""
PROBLEMS = {
    "tests/test_import.py": "import nothing_of_that_name\n",
    "tests/test_dies.py": "def test_it():\n    import os\n    os._exit(3)\n",
    "tests/test_hangs.py": "def test_it():\n    import time\n    time.sleep(60)\n",
    "tests/test_empty.py": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program leaves of runs before and after, which go at the same time."""
    place = tmp_path_factory.mktemp("run")
    files = {"tests/test_outcomes.py": OUTCOMES, **PROBLEMS}
    write(place / "run", files)
    (place / "files.json").write_text(json.dumps(list(files)))
    runs = [
        subprocess.Popen(
            [
                *(sys.executable, str(PROGRAM), "../files.json"),
                *(f"../cpu-{side}.json", "--jobs", "2", "--seconds", "8"),
            ],
            cwd=place / "run",
            env={"SIDE": side, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for side in BOTH
    ]
    assert [run.wait() for run in runs] == [0, 0]
    return place


def test_each_outcome_is_known(folder: Path) -> None:
    (found,) = (c for c in compared(folder, "cpu") if "outcomes" in c.file)
    assert found.before.tests == {
        "test_passes": "passed",
        "test_changes": "passed",
        "test_skipped": "skipped",
        "test_error": "error",
        "test_known": "xfailed",
    }
    assert found.changed == ("test_changes: passed → failed",)
    assert (found.count("before", "passed"), found.count("after", "passed")) == (2, 1)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("import", "failed: ModuleNotFoundError: No module named 'nothing_of_that"),
        ("dies", "its process died"),
        ("hangs", "it was killed at its limit"),
        ("empty", "pytest ended with exit status 5"),
    ],
)
def test_a_file_without_outcomes_says_why(
    folder: Path, file: str, problem: str
) -> None:
    (found,) = (c for c in compared(folder, "cpu") if file in c.file)
    assert found.after.problem.startswith(problem)
    assert not found.changed


def test_of_a_file_killed_at_its_limit_the_tests_that_ended_twice_count() -> None:
    before = FileRun({"a": "passed", "b": "passed"}, "it was killed at its limit", 8)
    after = FileRun({"a": "failed"}, "it was killed at its limit", 8)
    assert Compared("f", before, after).changed == ("a: passed → failed",)
    whole = FileRun({"a": "failed"}, "", 1)
    assert Compared("f", FileRun(before.tests, "", 1), whole).changed == (
        "a: passed → failed",
        "b: passed → -",
    )


def test_files_that_a_run_did_not_reach_are_left_out(tmp_path: Path) -> None:
    run = {"tests": {"a": "passed"}, "problem": "", "seconds": 1}
    (tmp_path / "cuda-before.json").write_text(json.dumps({"f": run, "g": run}))
    (tmp_path / "cuda-after.json").write_text(json.dumps({"f": run}))
    assert [found.file for found in compared(tmp_path, "cuda")] == ["f"]


def test_a_run_that_left_nothing_or_half_is_named(tmp_path: Path) -> None:
    (tmp_path / "cuda-before.json").write_text('{"f": {"tests"')
    for platform in ("cuda", "cpu"):
        with pytest.raises(UsageError) as caught:
            compared(tmp_path, platform)
        assert caught.value.path == str(tmp_path / f"{platform}-before.json")


def test_the_command_names_each_platform() -> None:
    device = inspect.signature(upstream_tests).parameters["device"]
    assert get_args(device.annotation) == get_args(Device) == tuple(PLATFORMS)


def test_rows_of_other_files_steps_and_platforms_stay(tmp_path: Path) -> None:
    release = load(Project.find(Path(__file__).parent))["v0.33.0"]
    green, red = FileRun({"a": "passed"}, "", 1), FileRun({"a": "failed"}, "", 1)
    place = tmp_path / "rows.csv"
    for step, device in ((None, "cpu"), ("a-step", "cpu"), (None, "cuda")):
        found = [Compared(file, green, green) for file in ("f", "g")]
        write_rows(place, rows_of(found, release, step, device))
    write_rows(place, rows_of([Compared("f", green, red)], release, None, "cpu"))
    rows = read_rows(place)
    assert len(rows) == 6 and rows[-1] == {
        "release": "v0.33.0",
        "step": "all",
        "platform": "cpu",
        "file": "f",
        "passed_before": "1",
        "passed_after": "0",
        "failed_before": "0",
        "failed_after": "1",
        "skipped_after": "0",
        "changed": "a: passed → failed",
        "not_run": "",
    }
    assert [row["changed"] for row in rows[:-1]] == [""] * 5
