# SPDX-License-Identifier: Apache-2.0
"""The Python modules of vllm-xpu-kernels that run around its ops."""

import hashlib
import zipfile
from pathlib import Path

from stack.base.download import download
from stack.base.index import PipConfiguration
from stack.core.cache import Cache

WRAPPERS = {
    "0.1.13.2": "28667366a738b0065ccc28661f929a6d3a7ccca89ed2c27a634de79a317d2781",
    "0.1.14.1": "2b4719275364e089cf4b15a6cc30b05e1a37cd1b6e9ba612cec27aa9e830999a",
    "0.1.15.4": "4ec262f7afdd07c62defc8286dc9f357569627b996c09b410f7972b653696fe7",
}
"""SHA-256 of the wheels of vllm-xpu-kernels on the package index, whose own Python runs
around the emulated ops. Others are nowhere that pip looks: our class stands in."""
WRAPPED = (
    "flash_attn_interface.py",
    "fused_moe_interface.py",
    "moe_utils.py",
    "quantization/",
)


def wrappers_of(cache: Cache, version: str, work: Path) -> Path:
    """The folder in `work` with the modules of a version's wheel."""
    folder = work / f"wrappers-{version}"
    with cache.lock(f"wrappers-{version}"):
        if not folder.is_dir():
            with zipfile.ZipFile(_fetch(cache, version)) as archive:
                for name in archive.namelist():
                    inside = name.removeprefix("vllm_xpu_kernels/")
                    if inside.startswith(WRAPPED) and name.endswith(".py"):
                        target = folder / inside
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(name))
    return folder


def _fetch(cache: Cache, version: str) -> Path:
    """The wheel of vllm-xpu-kernels, downloaded once (141 MB) and hashed each time."""
    sha256 = WRAPPERS[version]
    name = f"vllm_xpu_kernels-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    found = cache.sdists / sha256 / name
    if not found.is_file():
        index = PipConfiguration.of_this_machine().index()
        wanted = f"vllm-xpu-kernels=={version}"
        links = [
            package.link
            for package in index.finder.find_matches(wanted)
            if package.link.filename == name
        ]
        assert links, f"none of pip's indexes and find-links has {name}"
        with cache.lock(f"wheel-{sha256}"):
            file, _ = download(links[0], cache, index.client, sha256)
            assert file is not None, f"the index serves another {name}"
            found = file
    with open(found, "rb") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == sha256, found
    return found
