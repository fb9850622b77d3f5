# SPDX-License-Identifier: Apache-2.0
"""A checkout on a machine whose GPU, driver and programs are made up."""

import shutil
import sys
from pathlib import Path

import pytest

from proof.on_device.stages import model
from proof.on_device.stages.prove import AHEAD_OF_TIME

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with what stages look at, and a Python that stands in for a GPU's."""
    root = tmp_path / "checkout"
    (root / "docs/data").mkdir(parents=True)
    for name in ("releases.toml", "pyproject.toml", AHEAD_OF_TIME):
        shutil.copy(ROOT / name, root / name)
    for folder in ("kernels", "lab/aot"):
        shutil.copytree(
            ROOT / folder,
            root / folder,
            ignore=shutil.ignore_patterns("__pycache__", "tuned"),
        )
    for folder in ("lab/benchmarks", "proof", "tests/kernels"):
        (root / folder).mkdir(parents=True)
    (root / "docs/devices.md").write_text(
        "# Devices\n\n<!-- devices: begin -->\n<!-- devices: end -->\n"
    )
    for page in model.PAGES:
        (root / page).write_text("A page.\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE}/fake_python.py "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(root)
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    return root
