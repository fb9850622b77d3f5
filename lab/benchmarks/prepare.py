# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.prepare`: fetch the other implementations into `.bench/`.

They are never committed: the kernel files of vLLM 0.33.0, from its pinned and verified
source archive, FlashMLA's CUDA extension with its Python interface, from vLLM 0.23.0's
CUDA wheel, and Marlin's experts and triton_kernels, from that of 0.33.0. Range requests
transfer only the needed members of a wheel; zip's own checksums verify them.
"""

import argparse
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import httpx2
from unearth import PackageFinder

from stack.base.archive import members
from stack.base.download import fetch
from stack.base.index import PipConfiguration
from stack.base.releases import load
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem, StackError
from stack.core.project import Project

from .files import FILES, FLASHMLA_FOLDER, WHEEL_FOLDER

FOLDER = ".bench"
UPSTREAM = "0.33.0"
FLASHMLA = (
    "0.23.0",
    (
        "vllm/_flashmla_C.abi3.so",
        "vllm/third_party/flashmla/flash_mla_interface.py",
    ),
)
"""A wheel's version, and how the names of the members begin that are needed."""
EXPERTS = (
    UPSTREAM,
    (
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/third_party/triton_kernels/",
        "vllm/scalar_type.py",
        "vllm/model_executor/layers/fused_moe/fused_moe.py",
        "vllm/model_executor/layers/quantization/utils/marlin_utils.py",
        "vllm/model_executor/layers/quantization/utils/marlin_utils_test.py",
    ),
)
BLOCK = 1 << 20


class RangeFile(io.RawIOBase):
    """A remote file, read in blocks of 1 MiB by range requests."""

    def __init__(self, client: httpx2.Client, address: str) -> None:
        super().__init__()
        self._client = client
        self._address = address
        self._blocks: dict[int, bytes] = {}
        self._position = 0
        self._size = int(self._get(0, 0).headers["content-range"].rpartition("/")[2])

    def _get(self, first: int, last: int) -> httpx2.Response:
        headers = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        response = self._client.get(self._address, headers=headers)
        response.raise_for_status()
        if response.status_code != 206:
            raise EnvironmentProblem(
                "the index does not answer range requests, which this needs",
                hint="python -m pip config list",
            )
        return response

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        index, start = divmod(self._position, BLOCK)
        if self._position >= self._size:
            return 0
        if index not in self._blocks:
            last = min((index + 1) * BLOCK, self._size) - 1
            self._blocks[index] = self._get(index * BLOCK, last).content
        part = self._blocks[index][start : start + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def from_wheel(target: Path, version: str, wanted: tuple[str, ...]) -> None:
    """Extract what vLLM's CUDA wheel has under `wanted` into `target`."""
    index = PipConfiguration.of_this_machine().index()
    addresses = [
        str(source["url"])
        for source in index.finder.sources
        if source["type"] == "index"
    ]
    finder = PackageFinder(
        index.client,  # type: ignore[arg-type]
        index_urls=addresses,
        ignore_compatibility=True,
    )
    links = [
        package.link
        for package in finder.find_matches(f"vllm=={version}")
        if package.link.filename.endswith("x86_64.whl")
    ]
    if not links:
        raise EnvironmentProblem(
            f"none of pip's indexes has a wheel of vllm {version} for x86_64",
            hint="python -m pip config list",
        )
    remote = io.BufferedReader(RangeFile(index.client, links[0].normalized), BLOCK)
    with zipfile.ZipFile(remote) as wheel:
        for name in wheel.namelist():
            if name.startswith(wanted):
                print(f"{name} from {links[0].filename}")
                _write(target / name, wheel.read(name))


def upstream(target: Path, release: str = UPSTREAM) -> None:
    """Extract a release's kernel files from its pinned archive into `target`."""
    project = Project.find()
    sdist = fetch(load(project)[f"v{release}"], Cache.default(progress=print))
    for member in members(sdist, release=f"v{release}"):
        if member.path in FILES[release]:
            _write(target / member.path, member.data)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.prepare", description=__doc__
    )
    parser.add_argument("--no-flashmla", action="store_true", help="upstream only")
    options = parser.parse_args(arguments)
    folder = Project.find().root / FOLDER
    try:
        upstream(folder / UPSTREAM)
        if not options.no_flashmla:
            from_wheel(folder / FLASHMLA_FOLDER, *FLASHMLA)
            from_wheel(folder / WHEEL_FOLDER, *EXPERTS)
    except StackError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{folder} holds {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
