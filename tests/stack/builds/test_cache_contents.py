# SPDX-License-Identifier: Apache-2.0
"""What the cache holds, and what a cleanup removes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from calls import calling
from fake_stack import FakeStack

from stack.base.store import Store
from stack.builds import cache_contents
from stack.builds.cache_contents import Area, gc, info
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem

PAGE = b"x" * 4096
DAY = 86_400.0


def write(path: Path, data: bytes = PAGE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def age(path: Path, days: float = 8) -> None:
    when = path.stat().st_mtime - days * DAY
    os.utime(path, (when, when))


def test_linked_files_count_once(cache: Cache):
    first = write(cache.root / "builds" / "one" / "site" / "a.py")
    for name in ("two", "three"):
        target = cache.root / "builds" / name / "site" / "a.py"
        target.parent.mkdir(parents=True)
        os.link(first, target)
    other = cache.root / "other" / "a.py"
    other.parent.mkdir(parents=True)
    os.link(first, other)
    cache.results_put("test-a", {})
    areas = info(cache)
    assert [(area.name, area.entries) for area in areas] == [
        ("builds", 3),
        ("other", 1),
        ("results", 1),
    ]
    assert areas == [
        Area(area.name, area.entries, size)
        for area, size in zip(areas, du(cache), strict=True)
    ]
    assert info(Cache(cache.root / "none")) == []


def du(cache: Cache) -> list[int]:
    """What coreutils count of each folder: one with many links in the first alone."""
    folders = sorted(str(path) for path in cache.root.iterdir())
    command = ["du", "--summarize", "--block-size=1", "--", *folders]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(line.partition("\t")[0]) for line in done.stdout.splitlines()]


def test_a_real_cache_is_as_large_as_it_is_on_disk(stack: FakeStack):
    """Folders take blocks, too; a link or a broken one is not followed."""
    stack.trees()
    (stack.cache.root / "sdists/gone").symlink_to("nowhere")
    (stack.cache.root / "sdists/all").symlink_to(stack.cache.objects)
    (stack.cache.root / "empty").mkdir()
    sizes = [area.bytes for area in info(stack.cache)]
    assert sizes == du(stack.cache)


def test_each_file_is_asked_for_once(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """A cache has millions of names of some thousand files."""
    first = write(cache.builds / "0" / "site/a.py")
    for number in range(1, 50):
        (cache.builds / f"{number}").mkdir()
        os.link(first, cache.builds / f"{number}" / "a.py")
    asked: list[str] = []
    lstat = os.lstat

    def counted(path: str) -> os.stat_result:
        asked.append(str(path))
        return lstat(path)

    monkeypatch.setattr(os, "lstat", counted)
    info(cache)
    assert len([path for path in asked if path.endswith("a.py")]) == 1


def test_a_long_listing_says_how_far_it_is(cache: Cache, monkeypatch):
    for name in ("one", "two"):
        write(cache.builds / name / "site/a.py")
        write(cache.builds / name / "site/b.py")
    heard: list[str] = []
    monkeypatch.setattr(cache_contents, "_SECONDS", 0.0)
    info(cache, heard.append)
    assert {message.removeprefix("reading builds: ") for message in heard} == {
        "0 files",
        "2 files",
    }


def test_what_was_used_lately_stays(cache: Cache):
    for name in ("new", "old"):
        cache.results_put(f"test-{name}", {})
        write(cache.builds / name / "site/a.py")
        write(cache.sdists / name / "vllm-0.1.tar.gz")
    areas = ("builds", "sdists")
    old = [cache.root / area / "old" for area in areas]
    for path in (*old, cache.results / "te/test-old.json"):
        age(path)
    gc(cache)
    assert not any(path.exists() for path in old)
    assert all((cache.root / area / "new").exists() for area in areas)
    assert cache.results_get("test-old") is None
    assert cache.results_get("test-new") == {}


def test_what_a_series_uses_stays_and_is_made_again(stack: FakeStack):
    before = stack.trees()
    cache, store = stack.cache, Store(stack.cache)
    refs = [cache.objects / ref for ref in store.refs()]
    for path in refs:
        age(path)
    assert stack.trees() == before
    gc(cache)
    assert {cache.objects / ref for ref in store.refs()} == set(refs)
    for path in refs:
        age(path)
    gc(cache)
    assert store.refs() == {}
    assert store.git.run("fsck", "--full", "--strict") == b""
    assert [tree.commit for tree in stack.trees()] == [tree.commit for tree in before]


def test_a_result_that_is_read_is_used(cache: Cache):
    cache.results_put("test-a", {})
    age(cache.results / "te/test-a.json")
    assert cache.results_get("test-a") == {}
    gc(cache)
    assert cache.results_get("test-a") == {}


def test_the_scratch_of_a_living_writer_stays(cache: Cache):
    with cache.scratch() as work:
        left = write(cache.root / "scratch" / ".xpustack-0123456789abcdef.part" / "a")
        gc(cache)
        assert work.is_dir() and not left.exists()


def test_nothing_goes_while_another_run_uses_the_cache(cache: Cache):
    cache.results_put("test-old", {})
    with (
        cache.in_use(),
        cache.in_use(),
        pytest.raises(EnvironmentProblem, match="another run uses the cache"),
    ):
        gc(cache, days=0)
    gc(cache, days=0)
    assert cache.results_get("test-old") is None


def test_the_commands(stack: FakeStack, monkeypatch: pytest.MonkeyPatch):
    call = calling(stack, monkeypatch)
    stack.trees()
    left = ".xpustack-0123456789abcdef.part"
    file = write(stack.cache.root / "scratch" / left / "a", PAGE * 10)
    size = sum(os.lstat(path).st_blocks * 512 for path in (file, file.parent))
    assert size >= 40960
    done = call("cache", "info")
    assert done.exit_code == 0, done.output
    assert f"{stack.cache.root}: " in done.stdout
    done = call("cache", "gc", "--json")
    answer = json.loads(done.stdout)
    data = answer["data"]
    assert (answer["command"], data["before"] - data["bytes"]) == ("cache gc", size)
    assert "freed 0 bytes" in call("cache", "gc").stdout
    assert call("cache").stdout.startswith("Usage: ")
