# SPDX-License-Identifier: Apache-2.0
"""Small vLLM source archives, the same bytes each time, and their pins."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from stack.base.releases import Pin, Release

XPU_TXT = "requirements/xpu.txt"
FILES = {
    "README.md": b"a small base\n",
    "vllm/__init__.py": b"__version__ = 'small'\n",
    XPU_TXT: b"torch==2.11.0\ntriton==3.7.0\nvllm_xpu_kernels==0.1.9\n",
}


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
    """The pin of an archive that `write_sdist` made."""
    pin = Pin("2.11.0", XPU_TXT)
    return Release(
        version=sdist.name.removeprefix("vllm-").removesuffix(".tar.gz"),
        sdist=sdist.name,
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        revision=1,
        torch=pin,
        triton=pin,
        xpu_kernels=pin,
    )
