# SPDX-License-Identifier: Apache-2.0
"""The committed op schemas are those that real vllm-xpu-kernels wheels register."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from stack.base.download import download
from stack.base.index import PipConfiguration
from stack.core.cache import Cache
from standins.emulated_xpu.wheel.pins import schemas
from standins.emulated_xpu.wheel.wheel_schemas import (
    canonical,
    schemas_by_library,
    schemas_in,
)

WHEELS = {
    "0.1.15.4": "4ec262f7afdd07c62defc8286dc9f357569627b996c09b410f7972b653696fe7",
    "0.1.16.2": "86bfa26abbb605fab485236a386e6de07f76320177c456fa96e55c27502af17a",
}
NAMESPACES = {
    "_C": ("_C", "_C_cache_ops"),
    "_moe_C": ("_moe_C",),
    "_vllm_fa2_C": ("_vllm_fa2_C",),
    "_xpu_C": ("_xpu_C",),
}


def wheel(cache: Cache, version: str) -> Path:
    """The wheel, downloaded once (71 to 144 MiB) and hashed each time."""
    sha256 = WHEELS[version]
    name = f"vllm_xpu_kernels-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    path = cache.sdists / sha256 / name
    if not path.is_file():
        path = fetch_wheel(cache, version, name)
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == sha256, path
    return path


def fetch_wheel(cache: Cache, version: str, name: str) -> Path:
    sha256 = WHEELS[version]
    index = PipConfiguration.of_this_machine().index()
    links = [
        package.link
        for package in index.finder.find_matches(f"vllm-xpu-kernels=={version}")
        if package.link.filename == name
    ]
    assert links, f"none of pip's indexes and find-links has {name}"
    with cache.lock(f"wheel-{sha256}"):
        file, _ = download(links[0], cache, index.client, sha256)
        assert file is not None, f"the index serves another {name}"
        return file


@pytest.mark.parametrize("version", WHEELS)
def test_the_committed_schemas_are_those_of_the_wheel(
    real_cache: Cache, version: str
) -> None:
    derived = schemas_by_library(wheel(real_cache, version))
    assert derived.keys() == NAMESPACES.keys()
    committed = schemas(version)
    for library, namespaces in NAMESPACES.items():
        expected = {
            canonical(schema)
            for name, schema in committed.items()
            if name.partition("::")[0] in namespaces
        }
        assert derived[library] == expected, library
    assert sum(map(len, derived.values())) == len(committed) > 90


def test_only_schemas_are_taken_from_a_library() -> None:
    op = b"silu(Tensor! out, Tensor x) -> ()"
    overload = b"cat.out(Tensor[] xs, *, Tensor(a!) out) -> Tensor(a!)"
    messages = (
        b"desc() -> a_desc",
        b"f(int) ->",
        b"run(no) -> way",
        b"\xff(a) -> Tensor",
    )
    library = b"\0".join([b"\x7fELF", op, b"x", overload, *messages, b""])
    assert set(schemas_in(library)) == {
        canonical(op.decode()),
        canonical(overload.decode()),
    }


def test_schemas_are_found_by_extension_module(tmp_path: Path) -> None:
    path = tmp_path / "k.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("k/_C.abi3.so", b"\0one(Tensor x) -> Tensor\0")
        archive.writestr("k/_none.abi3.so", b"\0nothing\0")
        archive.writestr("k/libk.so", b"\0two(Tensor x) -> Tensor\0")
    assert schemas_by_library(path) == {"_C": {"one(Tensor x) -> Tensor"}}
