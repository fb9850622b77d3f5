# SPDX-License-Identifier: Apache-2.0
"""The tool as it is installed, without what only a checkout has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLAN = "plan v0.33.0 --model flash --device b60 --count 1"


@pytest.mark.parametrize("folder", [False, True], ids=["alone", "beside a folder"])
@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ("device", "on_device"),
        ("ingest a.json", "on_device"),
        (PLAN, "planner"),
        ("export v0.33.0", "upstream"),
        ("upstream-tests v0.33.0", "upstream"),
    ],
)
def test_a_command_says_what_only_the_checkout_has(
    tmp_path: Path, words: str, lacks: str, folder: bool
) -> None:
    (tmp_path / "xpustack").symlink_to(ROOT / "xpustack")
    if folder:
        (tmp_path / lacks).mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "xpustack", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"the command needs {lacks}, which is not installed" in done.stderr
    assert "next: bin/xpustack with the same words" in done.stderr
