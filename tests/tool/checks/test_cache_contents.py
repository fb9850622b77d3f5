# SPDX-License-Identifier: Apache-2.0
"""What the cache holds, and what a cleanup removes."""

import json
import os
import secrets
from pathlib import Path

import pytest
from calls import calling
from fake_stack import ATTENTION, FakeStack, edited

from xpustack.base.store import Store
from xpustack.builds.build import build_key, build_version
from xpustack.builds.installed import install, store_files
from xpustack.checks.cache_contents import Area, Needs, gc, in_use, info, needs
from xpustack.checks.proof import result_keys
from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem, SeriesError

PAGE = b"x" * 4096


def write(path: Path, data: bytes = PAGE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_linked_files_count_once(cache: Cache):
    first = write(cache.root / "builds" / "one" / "site" / "a.py")
    for name in ("two", "three"):
        target = cache.root / "builds" / name / "site" / "a.py"
        target.parent.mkdir(parents=True)
        os.link(first, target)
    content = cache.root / "files" / "ab" / "abcd"
    content.parent.mkdir(parents=True)
    os.link(first, content)
    cache.results_put("test-a", {})
    areas = {area.name: area for area in info(cache)}
    assert areas["builds"] == Area("builds", 3, 4096)
    assert areas["files"] == Area("files", 1, 0)
    assert areas["results"].entries == 1
    assert info(Cache(cache.root / "none")) == []


def test_what_the_series_reach_stays(stack: FakeStack):
    stack.trees()
    stack.trees("v2.0")
    needed = needs(stack.project, stack.cache)
    trees = stack.trees()
    builds = [
        build_key(Store(stack.cache), tree, build_version(tree, 3)) for tree in trees
    ]
    results = sorted(result_keys(stack.project, stack.cache, stack.series()))
    for key in builds:
        write(stack.cache.root / "builds" / key / "site" / "a.py")
    for key in results:
        stack.cache.results_put(key, {})
    before = stack.contents(), Store(stack.cache).refs(), info(stack.cache)
    assert gc(stack.cache, needed, days=0) == []
    assert (stack.contents(), Store(stack.cache).refs(), info(stack.cache)) == before
    assert len(results) == 3 * 3 + 1


def test_what_nothing_reaches_goes(stack: FakeStack):
    cache = stack.cache
    stack.trees()
    stack.step("fourth", {"vllm/attention.py": edited(ATTENTION, 20)}, release="v2.0")
    stack.trees("v2.0")
    count = len(Store(cache).refs())
    (stack.project.series_dir("v2.0") / "series").write_text("")
    stack.patch("fourth", "v2.0").unlink()
    stale = [
        write(cache.root / "builds" / "old" / "site" / "a.py"),
        write(cache.sdists / ("0" * 64) / "vllm-0.1.tar.gz"),
        write(cache.root / "mypy" / "v1.0" / "cache.json"),
        write(cache.root / "scratch" / "left" / "work"),
    ]
    cache.results_put("test-old", {})
    needed = needs(stack.project, cache)
    announced = gc(cache, needed, days=0, dry_run=True)
    assert all(path.is_file() for path in stale)
    assert len(Store(cache).refs()) == count
    removed = gc(cache, needed, days=0)
    assert [(area.name, area.entries) for area in removed] == [
        (area.name, area.entries) for area in announced
    ]
    areas = {area.name: area for area in removed}
    assert (areas["builds"].bytes, areas["sdists"].bytes) == (4096, 4096)
    assert areas["objects"].entries == 1
    assert areas["objects"].bytes > 0
    assert not any(path.exists() for path in stale)
    assert cache.results_get("test-old") is None
    assert len(Store(cache).refs()) == count - 1
    assert [tree.commit for tree in stack.trees()]
    assert Store(cache).git.run("fsck", "--full", "--strict") == b""


def test_the_base_of_an_unpinned_release_goes(stack: FakeStack):
    stack.trees("v2.0")
    pins = stack.project.releases_file
    head, mark, tail = pins.read_text().partition('version = "2.0"')
    gone = stack.releases["v2.0"].sha256
    pins.write_text(head.rpartition("[[release]]")[0])
    assert mark and tail
    gc(stack.cache, needs(stack.project, stack.cache), days=0)
    assert not (stack.cache.sdists / gone).exists()
    assert f"refs/bases/{gone}" not in Store(stack.cache).refs()
    assert len(stack.trees()) == 4


def test_what_was_used_lately_stays(cache: Cache):
    for name, age in (("new", 0.0), ("old", 8 * 86_400.0)):
        cache.results_put(f"test-{name}", {})
        memory = write(cache.root / "mypy" / f"{name}.db")
        for path in (cache.results / "te" / f"test-{name}.json", memory):
            when = path.stat().st_mtime - age
            os.utime(path, (when, when))
    areas = {area.name: area.entries for area in gc(cache, Needs())}
    assert areas == {"results": 1, "mypy": 1}
    assert cache.results_get("test-new") == {}
    assert [path.name for path in (cache.root / "mypy").iterdir()] == ["new.db"]


def test_a_content_goes_with_the_last_tree_that_has_it(cache: Cache):
    shared = write(cache.root / "files" / "aa" / "shared")
    own = write(cache.root / "files" / "bb" / "own")
    for name, contents in (("old", (shared, own)), ("new", (shared,))):
        for content in contents:
            target = cache.root / "builds" / name / "site" / content.name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(content, target)
    removed = gc(cache, Needs(builds={"new"}), days=0)
    assert {area.name: area.bytes for area in removed} == {"builds": 4096, "files": 0}
    assert shared.is_file() and not own.exists()


def test_contents_that_a_tree_lists_stay_without_links_and_with_byte_code(
    cache: Cache,
):
    listed, other = (
        store_files(cache, {"a.py": data}) for data in (b"A = 1\n", b"A = 2\n")
    )
    install(cache.contents, listed, cache.builds / "new")
    for path in (cache.builds / "new" / "site").rglob("*.py*"):
        path.unlink()
    removed = gc(cache, Needs(builds={"new"}), days=0)
    assert {area.name: area.entries for area in removed} == {"files": 2, "bytecode": 1}
    assert all(map(cache.contents.holds, listed.values()))
    assert not any(cache.contents.path(each).exists() for each in other.values())
    assert store_files(Cache(cache.root), {"a.py": b"A = 1\n"}) == listed


def test_the_scratch_of_a_living_writer_stays(cache: Cache):
    with cache.scratch() as work:
        left = write(cache.root / "scratch" / ".xpustack-0123456789abcdef.part" / "a")
        assert [area.entries for area in gc(cache, Needs())] == [1]
        assert work.is_dir() and not left.exists()


def test_nothing_goes_while_another_run_uses_the_cache(cache: Cache):
    cache.results_put("test-old", {})
    with (
        in_use(cache),
        in_use(cache),
        pytest.raises(EnvironmentProblem, match="another run uses the cache"),
    ):
        gc(cache, Needs(), days=0)
    assert gc(cache, Needs(), days=0)[0].entries == 1


def test_a_series_that_cannot_be_read_forbids_it(stack: FakeStack):
    stack.trees()
    patch = stack.patch("second")
    patch.write_text(patch.read_text().replace("-attention line 7", "-other", 1))
    with pytest.raises(SeriesError):
        needs(stack.project, stack.cache)


def test_the_commands(stack: FakeStack, monkeypatch: pytest.MonkeyPatch):
    call = calling(stack, monkeypatch)
    stack.trees()
    write(stack.cache.root / "scratch" / secrets.token_hex(4), PAGE * 10)
    done = call("cache", "info")
    assert done.exit_code == 0, done.output
    assert f"{stack.cache.root}: " in done.stdout
    done = call("cache", "gc", "--dry-run")
    assert (done.exit_code, "would free 41 kB" in done.stdout) == (0, True), done.output
    done = call("cache", "gc", "--json")
    answer = json.loads(done.stdout)
    assert (answer["command"], answer["data"]["bytes"]) == ("cache gc", 40960)
    assert "freed 0 B" in call("cache", "gc").stdout


def test_prune_removes_also_what_was_used_lately(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
):
    call = calling(stack, monkeypatch)
    needed = stack.trees()
    stack.cache.results_put("test-new", {})
    tree = write(stack.cache.root / "builds" / "unneeded" / "site" / "a.py", PAGE * 10)
    assert "freed 0 B" in call("cache", "gc").stdout
    done = call("cache", "--prune", "--dry-run")
    assert done.exit_code == 0 and "would free" in done.stdout, done.output
    assert tree.exists()
    done = call("cache", "--prune", "--json")
    answer = json.loads(done.stdout)
    data = answer["data"]
    assert answer["command"] == "cache --prune"
    assert data["before"] - data["after"] >= data["bytes"] >= 40960
    assert not tree.exists()
    assert stack.cache.results_get("test-new") is None
    assert [each.commit for each in stack.trees()] == [each.commit for each in needed]
    text = call("cache", "--prune").stdout
    assert "freed 0 B" in text and " before, " in text


def test_wrong_usage_of_prune(stack: FakeStack, monkeypatch: pytest.MonkeyPatch):
    call = calling(stack, monkeypatch)
    done = call("cache")
    assert (done.exit_code, "--prune" in done.output) == (2, True)
    done = call("cache", "--prune", "gc")
    assert (done.exit_code, "take no command" in done.output) == (2, True)
