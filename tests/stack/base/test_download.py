# SPDX-License-Identifier: Apache-2.0
"""Archives on their way into the cache: changed, cut, missing, killed, shared."""

import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from children import killed, read_until, start
from sdists import FILES, pinned, write_sdist
from server import IndexServer, serving

from stack.base.download import ATTEMPTS, fetch
from stack.base.index import PipConfiguration
from stack.base.releases import Release, load
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem, SourceError
from stack.core.project import Project

FETCH = """
from stack.base.download import fetch
try:
    fetch(pinned(Path(sys.argv[1])), Cache(Path(sys.argv[2]), progress=say))
    say("fetched")
except StackError as error:
    say(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def server(
    links: Path, sdist: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[IndexServer]:
    """An HTTP server as pip's only index, which offers `sdist`."""
    with serving(links) as running:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", running.simple)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


def leftovers(cache: Cache) -> list[Path]:
    return [path for path in cache.root.rglob(".xpustack-*")]


def test_an_archive_is_fetched_once_and_then_offline(
    release: Release, sdist: Path, cache: Cache
) -> None:
    messages: list[str] = []
    path = fetch(release, replace(cache, progress=messages.append))
    assert path == cache.sdists / release.sha256 / release.sdist
    assert path.read_bytes() == sdist.read_bytes()
    assert messages[0].startswith(f"downloading {release.sdist}")
    sdist.unlink()
    assert fetch(release, replace(cache, offline=True)) == path
    assert leftovers(cache) == []


def test_offline_says_what_is_absent(release: Release, cache: Cache) -> None:
    with pytest.raises(SourceError, match="--offline") as caught:
        fetch(release, replace(cache, offline=True))
    assert caught.value.release == "v9.1.0"
    assert str(caught.value.path).endswith(release.sdist)


def test_one_flipped_byte_in_the_cache_is_never_used(
    release: Release, cache: Cache
) -> None:
    path = fetch(release, cache)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(SourceError) as caught:
            fetch(release, cache)
        text = str(caught.value)
        assert "release: v9.1.0" in text and f"file: {path}" in text
        assert f"expected sha256 {release.sha256}" in text
        assert f"actual sha256   {pinned(path).sha256}" in text
        assert f"next: rm {path}" in text
    path.unlink()
    assert fetch(release, cache) == path


def test_another_archive_on_the_index_is_refused(
    release: Release, sdist: Path, cache: Cache
) -> None:
    write_sdist(sdist, {**FILES, "vllm/__init__.py": b"evil = True\n"})
    with pytest.raises(SourceError, match="differs from the pinned one") as caught:
        fetch(release, cache)
    assert f"expected sha256 {release.sha256}" in caught.value.detail
    assert not (cache.sdists / release.sha256).exists()
    assert leftovers(cache) == []


def test_an_absent_archive_is_named(
    release: Release, sdist: Path, cache: Cache
) -> None:
    sdist.unlink()
    with pytest.raises(SourceError, match="none of pip's indexes") as caught:
        fetch(release, cache)
    assert caught.value.release == "v9.1.0"


def test_an_archive_comes_over_http(
    server: IndexServer, release: Release, cache: Cache
) -> None:
    fetch(release, cache)
    assert server.downloads == 1


def test_a_truncated_download_is_tried_again(
    server: IndexServer, release: Release, cache: Cache
) -> None:
    server.cut, server.cut_times = 7, ATTEMPTS - 1
    fetch(release, cache)
    assert server.downloads == ATTEMPTS


def test_a_download_that_is_always_truncated_is_an_error(
    server: IndexServer, release: Release, cache: Cache
) -> None:
    server.cut, server.cut_times = 7, ATTEMPTS
    with pytest.raises(EnvironmentProblem, match="cannot download vllm") as caught:
        fetch(release, cache)
    assert caught.value.release == "v9.1.0"
    assert not cache.sdists.exists()
    assert leftovers(cache) == []


def test_an_index_that_does_not_answer_is_an_error(
    server: IndexServer,
    release: Release,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(EnvironmentProblem, match="cannot reach the package index"):
        fetch(release, cache)


def test_a_run_killed_while_downloading_leaves_nothing_that_matters(
    server: IndexServer, sdist: Path, release: Release, cache: Cache
) -> None:
    server.gate.clear()
    child = start(FETCH, sdist, cache.root)
    assert server.half_sent.wait(30)
    killed(child)
    assert len(leftovers(cache)) == 1
    assert not cache.sdists.exists()
    server.gate.set()
    fetch(release, cache)
    assert leftovers(cache) == []


def test_two_runs_at_once_download_once(
    server: IndexServer, sdist: Path, release: Release, cache: Cache
) -> None:
    server.gate.clear()
    first = start(FETCH, sdist, cache.root)
    assert server.half_sent.wait(30)
    second = start(FETCH, sdist, cache.root)
    read_until(second, "waiting for another run")
    assert len(leftovers(cache)) == 1
    server.gate.set()
    for child in (first, second):
        output, _ = child.communicate(timeout=30)
        assert child.returncode == 0 and "fetched" in output, output
    assert server.downloads == 1
    assert leftovers(cache) == []


@pytest.fixture
def large(links: Path) -> Path:
    """An archive of a megabyte that does not shrink."""
    return write_sdist(links / "vllm-9.2.0.tar.gz", {"a": os.urandom(1 << 20)})


def no_room(child: "subprocess.Popen[str]", disk: Path) -> None:
    output, _ = child.communicate(timeout=30)
    assert child.returncode == EnvironmentProblem.exit_code, output
    assert "the disk is full" in output
    assert f"file: {disk}" in output and "next: df -h" in output
    assert leftovers(Cache(disk)) == []


def test_a_full_disk_is_an_environment_problem(large: Path, small_disk: Path) -> None:
    no_room(start(FETCH, large, small_disk), small_disk)


def test_a_limit_on_file_size_is_an_environment_problem(
    large: Path, tmp_path: Path
) -> None:
    """The kernel's limit on a process's file size, which needs no privileges."""
    size = 256 << 10
    child = start(
        FETCH,
        large,
        tmp_path / "disk",
        limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    no_room(child, tmp_path / "disk")


def test_pip_s_settings_are_ranked_as_pip_ranks_them() -> None:
    listing = """\
:env:.default-timeout='180'
:env:.find-links='/a /b'
download.extra-index-url='file:///x file:///y'
global.extra-index-url='file:///z'
global.find-links='/c'
global.cert='/ca.pem'
install.index-url='file:///never'
"""
    configuration = PipConfiguration.from_listing(listing)
    assert configuration.settings == {
        "timeout": "180",
        "find-links": "/a /b",
        "extra-index-url": "file:///x file:///y",
        "cert": "/ca.pem",
    }


def test_an_index_folder_is_searched_too(
    sdist: Path,
    release: Release,
    cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = tmp_path / "simple" / "vllm" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="{sdist.as_uri()}">{sdist.name}</a>')
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "absent").as_uri())
    assert fetch(release, cache).read_bytes() == sdist.read_bytes()


def test_a_pin_with_another_hash_does_not_share_a_place(
    release: Release, cache: Cache
) -> None:
    fetch(release, cache)
    other = msgspec.structs.replace(release, sha256="0" * 64)
    with pytest.raises(SourceError, match="differs from the pinned one"):
        fetch(other, cache)


def test_every_pinned_release_can_be_fetched(
    real_project: Project, real_cache: Cache
) -> None:
    for release in load(real_project):
        assert pinned(fetch(release, real_cache)).sha256 == release.sha256
