# SPDX-License-Identifier: Apache-2.0
"""Hostile archives, each for one reason."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from sdists import write_sdist

from stack.base import archive
from stack.base.archive import (
    EXECUTABLE,
    LINK,
    PLAIN,
    ArchiveMember,
    members,
)
from stack.core.errors import SourceError


def plain(name: str, data: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info, b""


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return special(name, tarfile.SYMTYPE, target)


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return path


HOSTILE = {
    "absolute": ([plain("/etc/passwd")], "leaves the tree"),
    "parent": ([plain("top/../../x")], "leaves the tree"),
    "dot": ([plain("top/./x")], "not a plain relative path"),
    "backslash": ([plain("top/a\\b")], "not a plain relative path"),
    "quote": ([plain('top/"a"')], "not a plain relative path"),
    "git": ([plain("top/vllm/.GIT/config")], r"lies in \.git"),
    "second-top": ([plain("other/x")], "not inside a top folder"),
    "no-top": ([plain("x")], "not inside a top folder"),
    "link-absolute": ([link("top/l", "/etc")], "leaves the tree"),
    "link-parent": ([link("top/a/l", "../../x")], "leaves the tree"),
    "hard-link": ([special("top/y", tarfile.LNKTYPE, "top/x")], "no plain file"),
    "fifo": ([special("top/f", tarfile.FIFOTYPE)], "no plain file"),
    "character-device": ([special("top/d", tarfile.CHRTYPE)], "no plain file"),
    "block-device": ([special("top/d", tarfile.BLKTYPE)], "no plain file"),
    "parent-folder": ([special("top/../..", tarfile.DIRTYPE)], "leaves the tree"),
    "link-empty": ([link("top/l", "")], "leaves the tree"),
    "link-chain": (
        [link("top/a/b/l", "../.."), link("top/m", "a/b/l/../x")],
        "leaves the tree",
    ),
    "through-link": ([link("top/l", "a"), plain("top/l/x")], "lies in a file"),
    "duplicate": ([plain("top/x", b"1"), plain("top/x", b"2")], "there twice"),
    "duplicate-link": ([plain("top/x"), link("top/x", "y")], "there twice"),
    "file-then-folder": ([plain("top/x"), plain("top/x/y")], "lies in a file"),
    "folder-then-file": ([plain("top/x/y"), plain("top/x")], "there twice"),
    "file-then-its-folder": (
        [plain("top/x"), special("top/x", tarfile.DIRTYPE)],
        "there twice",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_member_is_refused_and_nothing_is_written(
    case: str, tmp_path: Path
) -> None:
    entries, reason = HOSTILE[case]
    path = pack(tmp_path / "vllm-9.1.0.tar.gz", plain("top/first"), *entries)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(SourceError, match=reason) as caught:
        list(members(path, release="v9.1.0"))
    assert caught.value.release == "v9.1.0"
    assert caught.value.path == str(path)
    assert caught.value.hint == f"tar -tvzf {path}"
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("limit", "value"), [("MEMBERS", 2), ("MEMBER_SIZE", 10)])
def test_absurd_counts_and_sizes_are_refused(
    limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sdist(
        tmp_path / "vllm-9.1.0.tar.gz", {"a": b"1" * 8, "b": b"2" * 8, "c": b"3" * 18}
    )
    monkeypatch.setattr(archive, limit, value)
    with pytest.raises(SourceError, match="more than an archive may have"):
        list(members(path))


def test_a_bomb_is_refused_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sdist(tmp_path / "vllm-9.1.0.tar.gz", {"a": bytes(1 << 24)})
    assert path.stat().st_size < 1 << 16
    monkeypatch.setattr(archive, "SIZE", 1 << 20)
    with pytest.raises(SourceError, match=f"unpacks to more than {1 << 20} bytes"):
        list(members(path))


def test_a_bomb_in_a_header_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tarfile reads a long-name record itself, before any member."""
    info = tarfile.TarInfo("././@LongLink")
    info.type = tarfile.GNUTYPE_LONGNAME
    info.size = 1 << 24
    path = tmp_path / "vllm-9.1.0.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf() + b"a" * info.size))
    monkeypatch.setattr(archive, "SIZE", 1 << 20)
    with pytest.raises(SourceError, match=f"unpacks to more than {1 << 20} bytes"):
        list(members(path))


@pytest.mark.parametrize("kept", [0, 10, 200, -8])
def test_a_cut_archive_is_damaged(kept: int, tmp_path: Path) -> None:
    path = write_sdist(tmp_path / "vllm-9.1.0.tar.gz", {"a": os.urandom(5000)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SourceError, match="the archive is damaged"):
        list(members(path))


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the archive is missing"):
        list(members(tmp_path / "vllm-9.1.0.tar.gz"))


def test_members_come_as_git_stores_them(tmp_path: Path) -> None:
    script, data = plain("top/run", b"#!/bin/sh\n")
    script.mode = 0o4755
    path = pack(
        tmp_path / "a.tar.gz",
        special("top", tarfile.DIRTYPE),
        link("top/sub/l", "../run"),
        (script, data),
        plain("top/sub/x", b"1"),
    )
    assert list(members(path)) == [
        ArchiveMember("sub/l", LINK, b"../run"),
        ArchiveMember("run", EXECUTABLE, b"#!/bin/sh\n"),
        ArchiveMember("sub/x", PLAIN, b"1"),
    ]


def test_pinned_releases_stay_far_below_the_limits() -> None:
    assert archive.MEMBERS >= 10 * 8_522
    assert archive.SIZE >= 4 * 140_000_000
