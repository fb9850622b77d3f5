# SPDX-License-Identifier: Apache-2.0
"""Fixtures of made-up stacks that tests of several rooms share; a `conftest.py` imports
those that its tests take."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from calls import Call, calling
from clones import ClonedStack
from fake_stack import FakeStack
from sdists import FILES, pinned, write_sdist
from shipped_stack import ShippedStack
from tiny_stack import TWO, VALUE, TinyStack

from stack.base.pin import release_entry
from stack.base.releases import Release
from stack.builds.build import backend_server
from stack.core import fingerprint
from stack.core.cache import Cache
from stack.core.process import Runner
from stack.core.project import Project
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


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """An empty cache of this test alone."""
    return Cache(tmp_path / "cache")


@pytest.fixture(scope="session")
def real_cache() -> Cache:
    """The cache that real archives are downloaded to, shared by all runs."""
    return Cache.default()


@pytest.fixture(scope="session")
def real_project() -> Project:
    """This repository."""
    return Project.find(Path(__file__).parent)


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip's configuration names."""
    folder = tmp_path / "links"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def sdist(links: Path) -> Path:
    """The archive of a small release 9.1.0, on offer in `links`."""
    return write_sdist(links / "vllm-9.1.0.tar.gz", FILES)


@pytest.fixture
def release(sdist: Path) -> Release:
    """The pin of `sdist`."""
    return pinned(sdist)


@pytest.fixture
def project(tmp_path: Path, release: Release) -> Project:
    """A project that pins `release` alone."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "releases.toml").write_text(release_entry(release))
    return Project(root)


@pytest.fixture(scope="session")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> FakeStack:
    """A stack whose v1.0 has three steps; take a copy to change it."""
    stack = FakeStack(tmp_path_factory.mktemp("stack"))
    stack.three_steps()
    return stack


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """A copy of `three_steps` for this test alone."""
    return three_steps.copy(tmp_path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyStack]:
    """A stack that builds in seconds. Tests share its cache; take a copy to change its
    files."""
    stack = TinyStack(tmp_path_factory.mktemp("tiny"))
    for release in ("v1.0", "v2.0"):
        stack.add("raise-value", {VALUE: TWO}, release)
    files = fingerprint.folder_files(stack.project.root)
    before = fingerprint.files_digest(files)
    yield stack
    after = fingerprint.files_digest(files)
    assert after == before, "a test changed the files that others share"


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> ShippedStack:
    """A stack with v1.0 built into `root/dist`; take a copy to change it."""
    stack = ShippedStack(tmp_path_factory.mktemp("shipped"))
    stack.ship(stack.root / "dist")
    return stack


@pytest.fixture
def call(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs the command line in `stack`."""
    return calling(stack, monkeypatch)
