# SPDX-License-Identifier: Apache-2.0
"""The search for ocloc: its order, apt's own mirror, and clear errors."""

from pathlib import Path

import pytest

from lab.aot.compiler.debian import FetchError, mirror
from lab.aot.compiler.ocloc import OclocError, find

RING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = f"""\
Types: deb
# URIs: http://snapshot.test/debian
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components:
# note: the rest is not needed
 main
Signed-By: {RING}

Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main
"""


def apt(folder: Path, name: str, text: str) -> Path:
    parts = folder / "sources.list.d"
    parts.mkdir(parents=True, exist_ok=True)
    (parts / name).write_text(text)
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_mirror_from_deb822(tmp_path: Path) -> None:
    apt(tmp_path, "debian.sources", SOURCES)
    assert mirror(tmp_path) == ("http://mirror.test/debian", RING)


def test_mirror_from_one_line_list(tmp_path: Path) -> None:
    text = (
        "# deb http://old.test/debian bookworm main\n"
        "deb http://tools.test/apt stable main\n"
        f"deb [arch=amd64 signed-by={RING}] http://mirror.test/debian/ trixie main\n"
    )
    (tmp_path / "sources.list").write_text(text)
    assert mirror(tmp_path) == ("http://mirror.test/debian/", RING)


@pytest.mark.parametrize(
    "text",
    [
        SOURCES.replace("Types: deb", "Enabled: no\nTypes: deb"),
        SOURCES.replace("Types: deb", "Types: deb-src"),
        SOURCES.replace(" main", " contrib"),
        "",
    ],
    ids=["disabled", "sources only", "no main", "empty"],
)
def test_no_archive_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(FetchError, match="no Debian archive"):
        mirror(apt(tmp_path, "debian.sources", text))


def test_named_binary_must_run(tmp_path: Path) -> None:
    with pytest.raises(OclocError, match="OCLOC = /nowhere: cannot be run"):
        find(tmp_path, environ={"OCLOC": "/nowhere"}, apt=tmp_path)


def test_named_binary_wins(tmp_path: Path) -> None:
    named = script(tmp_path / "mine", "echo 30.1.2.3")
    ocloc = find(tmp_path, environ={"OCLOC": str(named)}, apt=tmp_path)
    assert ocloc.command == (str(named),)
    assert ocloc.version == "30.1.2.3"


def test_recent_one_on_path_is_used(tmp_path: Path) -> None:
    script(tmp_path / "ocloc", "echo 26.9.1")
    ocloc = find(tmp_path / "cache", environ={"PATH": str(tmp_path)}, apt=tmp_path)
    assert ocloc.version == "26.9.1"


def test_old_one_on_path_is_refused_with_the_reason(tmp_path: Path) -> None:
    script(tmp_path / "ocloc", "echo 22.43.24595")
    with pytest.raises(OclocError) as caught:
        find(tmp_path / "cache", environ={"PATH": str(tmp_path)}, apt=tmp_path)
    message = str(caught.value)
    assert "version 22.43.24595, too old" in message
    assert "no Debian archive" in message
    assert "Set OCLOC" in message
