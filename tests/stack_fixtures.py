# SPDX-License-Identifier: Apache-2.0
"""Fixtures of made-up stacks that tests of several rooms share; a `conftest.py` imports
those that its tests take."""

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from clones import ClonedStack

from stack.builds.build import backend_server
from stack.core.process import Runner
from stack.forks.server import Server
from stack.steptest import server


@pytest.fixture(autouse=True)
def small_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch out of the test server of tests that do not need it."""
    monkeypatch.setattr(server, "PRELOADED", ("pytest",))


@pytest.fixture
def backend() -> Iterator[Server]:
    """What builds trees."""
    with closing(backend_server(Runner())) as backend:
        yield backend


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 512 KiB; the test is skipped where this user may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "xpustack", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if done.returncode:
        pytest.skip(f"this user cannot mount a small tmpfs: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> ClonedStack:
    """A stack whose upstream is a git repository; tests clone it and change nothing."""
    return ClonedStack(tmp_path_factory.mktemp("cloned"))
