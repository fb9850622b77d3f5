# SPDX-License-Identifier: Apache-2.0
"""A package index of built wheels: static pages in the form of PEP 503, and checksums.

The pages link by relative addresses, so the folder can be served from anywhere, also
from a disk: `pip install --index-url file:///…/dist/simple 'vllm==0.33.0+xpu.dsv4.3'`.
"""

import html
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xpustack.base.releases import Releases
from xpustack.builds import wheel
from xpustack.core.cache import atomic_file
from xpustack.core.errors import UsageError
from xpustack.release.inputs import sha256_of
from xpustack.release.ship import COMPANION_FILES

SIMPLE = "simple"
SUMS = "SHA256SUMS"
_PAGE = """\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8">
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
{links}
"""


@dataclass(frozen=True)
class IndexedWheels:
    """The result: the sha256 of each listed wheel, by its path in the folder."""

    directory: Path
    wheels: Mapping[str, str]


def write_index(pinned: Releases, directory: Path) -> IndexedWheels:
    """Write `simple/` and `SHA256SUMS` for the releases built into a folder.

    Raises:
        UsageError: no pinned release is built there.
    """
    directory = directory.absolute()
    sums: dict[str, str] = {}
    wheels: dict[str, str] = {}
    links = []
    for release in pinned:
        folder = directory / release.name
        for path in sorted(folder.glob("*")):
            is_wheel = path.name.startswith(f"vllm-{release.version}+xpu.dsv4.")
            if not (is_wheel or path.name in COMPANION_FILES):
                continue
            data = path.read_bytes()
            name = f"{release.name}/{path.name}"
            sums[name] = sha256_of(data)
            if is_wheel and path.suffix == ".whl":
                wheels[name] = sums[name]
                links.append(_link(name, sums[name], data))
    if not wheels:
        raise UsageError(
            "the folder has no wheel of a pinned release",
            path=directory,
            hint="xpustack build --all",
        )
    pages = {
        f"{SIMPLE}/index.html": _page("Packages", ['<a href="vllm/">vllm</a><br>']),
        f"{SIMPLE}/vllm/index.html": _page("vllm", links),
        SUMS: "".join(f"{digest}  {name}\n" for name, digest in sums.items()),
    }
    for name, text in pages.items():
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(place) as file:
            file.write(text.encode())
    return IndexedWheels(directory, wheels)


def _link(name: str, digest: str, data: bytes) -> str:
    requires = wheel.read(io.BytesIO(data)).metadata.get("Requires-Python", [])
    text = html.escape(name.rpartition("/")[2])
    address = html.escape(f"../../{name.replace('+', '%2B')}#sha256={digest}")
    python = "".join(
        f' data-requires-python="{html.escape(value)}"' for value in requires
    )
    return f'<a href="{address}"{python}>{text}</a><br>'


def _page(title: str, links: list[str]) -> str:
    return _PAGE.format(title=html.escape(title), links="\n".join(links))
