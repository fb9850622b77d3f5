# SPDX-License-Identifier: Apache-2.0
"""A new pin: what is read from the base, and what is left as it was."""

from dataclasses import replace
from pathlib import Path

import pytest
from sdists import FILES, XPU_TXT, pinned, write_sdist

from stack.base.pin import (
    DOCKERFILE,
    dependencies,
    find_pin,
    pin,
    release_entry,
    with_entry,
)
from stack.base.releases import Pin, Release, load, parse_releases
from stack.core.cache import Cache
from stack.core.errors import SourceError, UsageError
from stack.core.project import Project

WHEEL = "https://example.org/v0.1.8/vllm_xpu_kernels-0.1.8-cp38-abi3-linux_x86_64.whl"


def test_a_release_is_pinned_from_its_own_archive(
    project: Project, links: Path, cache: Cache
) -> None:
    archive = write_sdist(links / "vllm-9.2.0.tar.gz", FILES)
    messages: list[str] = []
    release = pin(project, replace(cache, progress=messages.append), "9.2.0")
    assert release == load(project)["v9.2.0"]
    assert (release.sha256, release.revision) == (pinned(archive).sha256, 1)
    assert release.xpu_kernels == Pin("0.1.9", XPU_TXT)
    assert (cache.sdists / release.sha256 / release.sdist).is_file()
    assert messages[0] == "looking for vllm 9.2.0"


@pytest.mark.parametrize("asked", ["9.1.0", "v9.1.0"])
def test_a_pinned_release_is_refused_and_nothing_changes(
    asked: str, project: Project, cache: Cache
) -> None:
    before = project.releases_file.read_bytes()
    with pytest.raises(UsageError, match="pinned already") as caught:
        pin(project, cache, asked)
    assert caught.value.release == "v9.1.0"
    assert project.releases_file.read_bytes() == before


def test_an_unknown_version_suggests_its_neighbours(
    project: Project, links: Path, cache: Cache
) -> None:
    for version in ("9.2.0", "9.10.0", "9.4.0rc1"):
        write_sdist(links / f"vllm-{version}.tar.gz", FILES)
    with pytest.raises(UsageError, match="no source archive") as caught:
        pin(project, cache, "9.3.0")
    assert caught.value.detail == ("nearest: 9.10.0, 9.2.0",)
    assert caught.value.hint == "xpustack pin 9.2.0"


def test_a_version_that_is_not_published_yet(
    project: Project, links: Path, cache: Cache
) -> None:
    """What is pinned is not to be pinned."""
    write_sdist(links / "vllm-9.0.0.tar.gz", FILES)
    newer = "upstream has nothing newer than v9.1.0"
    with pytest.raises(UsageError, match=newer) as caught:
        pin(project, cache, "9.2.0")
    assert caught.value.hint == "xpustack watch, which names the releases without a pin"
    with pytest.raises(UsageError, match="no source archive") as caught:
        pin(project, cache, "9.0.1")
    assert newer not in caught.value.message
    assert caught.value.hint == "xpustack pin 9.0.0"
    write_sdist(links / "vllm-9.3.0.tar.gz", FILES)
    with pytest.raises(UsageError, match=r"nothing newer than v9\.3\.0") as caught:
        pin(project, cache, "9.4.0")
    assert caught.value.hint == "xpustack pin 9.3.0"


def test_a_release_is_called_as_its_archive(
    project: Project, links: Path, cache: Cache
) -> None:
    write_sdist(links / "vllm-9.2.0.tar.gz", FILES)
    assert pin(project, cache, "9.2").name == "v9.2.0"
    with pytest.raises(UsageError, match="pinned already"):
        pin(project, cache, "9.1")


def test_a_word_is_not_a_version(project: Project, cache: Cache) -> None:
    with pytest.raises(UsageError, match="'new' is not a version"):
        pin(project, cache, "new")


def test_an_archive_that_differs_from_its_announcement_is_refused(
    project: Project,
    links: Path,
    cache: Cache,
    tmp_path: Path,
) -> None:
    archive = write_sdist(tmp_path / "vllm-9.2.0.tar.gz", FILES)
    (links / "page.html").write_text(
        f'<a href="{archive.as_uri()}#sha256={"0" * 64}">{archive.name}</a>'
    )
    before = project.releases_file.read_bytes()
    with pytest.raises(SourceError, match="not the one that the index announces"):
        pin(project, cache, "9.2.0")
    assert project.releases_file.read_bytes() == before
    assert not cache.sdists.exists()


def test_a_base_that_names_no_version_is_refused(
    project: Project, links: Path, cache: Cache
) -> None:
    files = {**FILES, XPU_TXT: b"torch==2.11.0\nvllm_xpu_kernels>=0.1\n"}
    write_sdist(links / "vllm-9.2.0.tar.gz", files)
    with pytest.raises(SourceError, match="Triton, vllm-xpu-kernels") as caught:
        pin(project, cache, "9.2.0")
    assert caught.value.release == "v9.2.0"
    assert load(project).names == ("v9.1.0",)


@pytest.mark.parametrize(
    ("files", "names", "dependency"),
    [
        ({XPU_TXT: "torch==2.11.0+xpu\n"}, ("torch",), Pin("2.11.0+xpu", XPU_TXT)),
        ({XPU_TXT: "torchaudio==2.11.0\n"}, ("torch",), None),
        ({XPU_TXT: "torch>=2.11.0\n"}, ("torch",), None),
        ({XPU_TXT: "# torch==2.11.0\n"}, ("torch",), None),
        ({XPU_TXT: "torch == 2.11.0 # why\n"}, ("torch",), Pin("2.11.0", XPU_TXT)),
        (
            {XPU_TXT: f"vllm_xpu_kernels @ {WHEEL}\n"},
            ("vllm-xpu-kernels",),
            Pin("0.1.8", XPU_TXT),
        ),
        (
            {XPU_TXT: "vllm_xpu_kernels @ https://example.org/main.zip\n"},
            ("vllm-xpu-kernels",),
            None,
        ),
        (
            {XPU_TXT: "torch\n", DOCKERFILE: "RUN pip install triton-xpu==3.7.0\n"},
            ("triton", "triton-xpu"),
            Pin("3.7.0", DOCKERFILE, "triton-xpu"),
        ),
        (
            {XPU_TXT: "triton==3.8.0+xpu\n", DOCKERFILE: "RUN x triton==1.0\n"},
            ("triton", "triton-xpu"),
            Pin("3.8.0+xpu", XPU_TXT),
        ),
        ({DOCKERFILE: "# triton-xpu==3.7.0\n"}, ("triton", "triton-xpu"), None),
        ({DOCKERFILE: "RUN x not-triton==3.7.0\n"}, ("triton", "triton-xpu"), None),
    ],
)
def test_a_version_is_read_where_it_stands(
    files: dict[str, str], names: tuple[str, ...], dependency: Pin | None
) -> None:
    assert find_pin(files, names) == dependency


def pinned_as(release: Release, version: str) -> Release:
    return Release(
        version=version,
        sdist=f"vllm-{version}.tar.gz",
        sha256=release.sha256,
        revision=1,
        torch=release.torch,
        triton=release.triton,
        xpu_kernels=release.xpu_kernels,
    )


@pytest.mark.parametrize("version", ["0.1.0", "0.22.0", "0.32.99", "0.100.0"])
def test_all_else_stays_byte_for_byte(
    version: str, real_project: Project, release: Release
) -> None:
    before = real_project.releases_file.read_text()
    before = before.replace(
        '[[release]]\nversion = "0.33.0"', '# why\n[[release]]\nversion = "0.33.0"'
    )
    after = with_entry(before, pinned_as(release, version))
    assert (
        len(parse_releases(after, Path("x")).names)
        == len(parse_releases(before, Path("x")).names) + 1
    )
    old, new = before.splitlines(), after.splitlines()
    added = len(new) - len(old)
    start = next(at for at, line in enumerate(new) if old[at : at + 1] != [line])
    assert old == new[:start] + new[start + added :]
    assert '# why\n[[release]]\nversion = "0.33.0"' in after


def test_the_first_pin_of_a_file(release: Release) -> None:
    for text in ("", "# pins\n", "# pins"):
        after = with_entry(text, release)
        assert after.startswith(text)
        assert parse_releases(after, Path("x")).names == ("v9.1.0",)


def test_a_new_entry_comes_before_the_retired_ones(release: Release) -> None:
    old = f'[[retired]]\nversion = "8.0"\ncommit = "{"ab" * 20}"\n'
    entry, new = release_entry(release), pinned_as(release, "9.9.0")
    after = with_entry(f"{entry}\n{old}", new)
    assert after == f"{entry}\n{release_entry(new)}\n{old}"


def test_dependencies_of_a_small_base(sdist: Path) -> None:
    torch, triton, xpu_kernels = dependencies(sdist, "v9.1.0")
    assert (torch.version, triton.version) == ("2.11.0", "3.7.0")
    assert xpu_kernels.version == "0.1.9"
