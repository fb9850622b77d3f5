# SPDX-License-Identifier: Apache-2.0
"""Small archives, projects and stacks that each test makes, and the real cache."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_stack import FakeStack
from sdists import FILES, pinned, write_sdist
from shipped_stack import ShippedStack
from stack_fixtures import backend, cloned, small_disk, small_server  # noqa: F401
from tiny_stack import TWO, VALUE, TinyStack

from stack.base.pin import release_entry
from stack.base.releases import Release
from stack.core import fingerprint
from stack.core.cache import Cache
from stack.core.project import Project


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
