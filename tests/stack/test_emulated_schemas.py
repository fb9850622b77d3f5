# SPDX-License-Identifier: Apache-2.0
"""The committed op schemas are what a real vllm-xpu-kernels wheel registers."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from emulated_xpu.pins import schemas
from emulated_xpu.schema_text import canonical, schemas_by_library, schemas_in
from xpustack.cache import Cache
from xpustack.index import PipConfiguration
from xpustack.source import download, keep

VERSION = "0.1.15.4"
WHEEL = f"vllm_xpu_kernels-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
SHA256 = "4ec262f7afdd07c62defc8286dc9f357569627b996c09b410f7972b653696fe7"
NAMESPACES = {
    "_C": ("_C", "_C_cache_ops"),
    "_moe_C": ("_moe_C",),
    "_vllm_fa2_C": ("_vllm_fa2_C",),
    "_xpu_C": ("_xpu_C",),
}


@pytest.fixture(scope="module")
def wheel(real_cache: Cache) -> Path:
    """The wheel, downloaded once (141 MB) and hashed each time."""
    found = real_cache.sdists / SHA256 / WHEEL
    if not found.is_file():
        found = fetch_wheel(real_cache)
    with open(found, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256, found
    return found


def fetch_wheel(cache: Cache) -> Path:
    index = PipConfiguration.of_this_machine().index()
    links = [
        package.link
        for package in index.finder.find_matches(f"vllm-xpu-kernels=={VERSION}")
        if package.link.filename == WHEEL
    ]
    assert links, f"none of pip's indexes and find-links has {WHEEL}"
    with cache.lock(f"wheel-{SHA256}"), cache.scratch() as directory:
        file, actual = download(links[0], directory, client=index.client)
        assert actual == SHA256, f"the index serves another {WHEEL}"
        return keep(file, actual, cache)


def test_every_committed_schema_stands_in_the_wheel(wheel: Path) -> None:
    derived = schemas_by_library(wheel)
    assert derived.keys() == NAMESPACES.keys()
    committed = schemas(VERSION)
    for library, namespaces in NAMESPACES.items():
        expected = {
            canonical(schema)
            for name, schema in committed.items()
            if name.partition("::")[0] in namespaces
        }
        assert derived[library] == expected, library
    assert sum(map(len, derived.values())) == len(committed) > 100


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
