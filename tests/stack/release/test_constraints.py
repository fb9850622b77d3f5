# SPDX-License-Identifier: Apache-2.0
"""What a wheel is installed with: read from the base, hashes from the index."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from shipped_stack import ShippedStack
from tiny_stack import DOCKERFILE, XPU_TXT

from stack.base.index import PipConfiguration
from stack.base.pin import DOCKERFILE as DOCKERFILE_PATH
from stack.base.releases import Pin, Release
from stack.core.markdown import rendered
from stack.release import runtime
from stack.release.resource import PinnedDistribution
from stack.release.ship import PINS, ship, with_written_hashes


def wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any") -> str:
    """An installable wheel with nothing in it; its sha256."""
    stem = f"{name}-{version}"
    path = folder / f"{stem}-{tag}.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes_of(pins: list[PinnedDistribution]) -> str:
    return rendered("stack.release", PINS, {"runtime": {"pins": pins}})


def pinned(release: Release, requirements: str) -> tuple[PinnedDistribution, ...]:
    return runtime.runtime(requirements, DOCKERFILE, "", release).pins


def page(links: Path) -> None:
    """A page that announces the hashes of the wheels in `links`."""
    rows = []
    for path in sorted(links.glob("*.whl")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        rows.append(f'<a href="{path.as_uri()}#sha256={digest}">{path.name}</a>')
    (links / "page.html").write_text("\n".join(rows))


@pytest.fixture
def index(links: Path, monkeypatch: pytest.MonkeyPatch):
    """pip's view of `links`, by a page that announces hashes."""

    def look() -> runtime.Index:
        page(links)
        monkeypatch.setenv("PIP_FIND_LINKS", str(links / "page.html"))
        return PipConfiguration.of_this_machine().index()

    return look


def test_torch_is_always_the_xpu_build(release: Release):
    torch, triton, kernels = pinned(release, "")
    assert (torch.requirement, triton.requirement, kernels.requirement) == (
        "torch==2.11.0+xpu",
        "triton==2.11.0",
        "vllm-xpu-kernels==2.11.0",
    )


def test_the_base_may_call_triton_otherwise(release: Release):
    other = msgspec.structs.replace(
        release, triton=Pin("3.7.0", DOCKERFILE_PATH, "triton-xpu")
    )
    assert pinned(other, "")[1].requirement == "triton-xpu==3.7.0"


def test_a_direct_address_is_kept(release: Release):
    kernels = pinned(release, XPU_TXT)[2]
    assert (kernels.url or "").startswith("https://example.org/vllm_xpu_kernels-")


def test_hashes_are_those_that_the_index_announces(links: Path, index):
    wanted = sorted(
        [
            wheel(links, "torch", "2.11.0+xpu", "cp311-cp311-linux_x86_64"),
            wheel(links, "torch", "2.11.0+xpu", "cp312-cp312-manylinux_2_28_x86_64"),
        ]
    )
    for version, tag in [
        ("2.11.0", "cp311-cp311-linux_x86_64"),
        ("2.11.0+cpu", "cp311-cp311-linux_x86_64"),
        ("2.11.0+xpu", "cp311-cp311-win_amd64"),
        ("2.11.0+xpu", "cp311-cp311-linux_aarch64"),
        ("2.12.0+xpu", "cp311-cp311-linux_x86_64"),
    ]:
        wheel(links, "torch", version, tag)
    pins = [
        PinnedDistribution("torch", "2.11.0+xpu", "x"),
        PinnedDistribution("absent", "1", "x"),
    ]
    hashed_pins = runtime.with_hashes(pins, index())
    assert [pin.hashes for pin in hashed_pins] == [tuple(wanted), ()]


def test_what_is_written_installs_by_hash_and_nothing_else(
    links: Path, index, tmp_path: Path
):
    """pip itself reads the files; a wheel that changed on the index is refused."""
    wheel(links, "torch", "2.11.0+xpu")
    pins = [
        PinnedDistribution("torch", "2.11.0+xpu", "x"),
        PinnedDistribution("absent", "1", "x"),
    ]
    text = hashes_of(runtime.with_hashes(pins, index()))
    (tmp_path / "pins.txt").write_text(text)

    def install(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--isolated",
                "install",
                "--no-index",
                "--no-deps",
                "--require-hashes",
                f"--find-links={links}",
                f"--target={tmp_path / name}",
                f"--requirement={tmp_path / 'pins.txt'}",
            ],
            capture_output=True,
            text=True,
        )

    done = install("good")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "good").glob("torch-2.11.0+xpu.dist-info"))
    with zipfile.ZipFile(next(links.glob("torch*.whl")), "a") as archive:
        archive.writestr("evil.py", "")
    done = install("changed")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_hashes_are_read_back_as_they_were_written():
    pins = [
        PinnedDistribution("torch", "2+xpu", "x", ("a" * 64, "b" * 64)),
        PinnedDistribution("triton", "3", "x"),
    ]
    text = hashes_of(pins)
    bare = [replace(pin, hashes=()) for pin in pins]
    assert with_written_hashes(bare, text) == pins
    assert with_written_hashes(bare, "") == bare


def test_an_online_build_asks_the_index(
    shipped: ShippedStack, links: Path, index, tmp_path: Path
):
    digest = wheel(links, "vllm_xpu_kernels", "2.11.0")
    index()
    online = replace(shipped.cache, offline=False)
    artifacts = ship(shipped.project, online, shipped.release, tmp_path)
    assert f"--hash=sha256:{digest}" in (artifacts.directory / PINS).read_text()
