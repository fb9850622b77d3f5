# SPDX-License-Identifier: Apache-2.0
"""Small archives and projects made on the spot, and the cache of real ones."""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from xpustack.cache import Cache
from xpustack.pin import entry
from xpustack.project import Project
from xpustack.releases import Pin, Release

XPU_TXT = "requirements/xpu.txt"
FILES = {
    "README.md": b"a small base\n",
    "vllm/__init__.py": b"__version__ = 'small'\n",
    XPU_TXT: b"torch==2.11.0\ntriton==3.7.0\nvllm_xpu_kernels==0.1.9\n",
}

SdistMaker = Callable[..., Path]


def write_sdist(path: Path, files: Mapping[str, bytes]) -> Path:
    """A gzipped tar of `files` under one top folder, the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    top = path.name.removesuffix(".tar.gz")
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(data))
    return path


def pinned(sdist: Path) -> Release:
    """The pin that fits an archive made by `write_sdist`."""
    here = Pin("2.11.0", XPU_TXT)
    return Release(
        version=sdist.name.removeprefix("vllm-").removesuffix(".tar.gz"),
        sdist=sdist.name,
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        revision=1,
        torch=here,
        triton=here,
        xpu_kernels=here,
    )


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
    (root / "releases.toml").write_text(entry(release))
    return Project(root)
