# SPDX-License-Identifier: Apache-2.0
"""What the cache holds, and that cleaning it up takes nothing that is used."""

import os
import time
from pathlib import Path

import pytest
from tiny_stack import TinyStack

from xpustack.bytecode import collect
from xpustack.cache import Cache
from xpustack.cache_contents import DAY, gc, info
from xpustack.process import Runner


@pytest.fixture
def stack(tmp_path: Path, tiny: TinyStack) -> TinyStack:
    other = tiny.elsewhere(tmp_path)
    other.builds(Runner())
    return other


def on_disk(root: Path) -> int:
    """The bytes that `du` counts below `root`'s entries."""
    inodes = {
        (status.st_dev, status.st_ino): status.st_blocks * 512
        for path in root.rglob("*")
        if (status := path.lstat())
    }
    return sum(inodes.values())


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_its_parts_add_up(stack: TinyStack):
    found = info(stack.cache)
    assert found.bytes == on_disk(stack.cache.root)
    parts = {part.name: part for part in found.parts}
    assert parts["builds"].entries == 2 and parts["sdists"].entries == 2
    assert parts["files"].meaning
    assert info(Cache(stack.root / "nothing")).parts == ()


def test_what_is_in_use_stays(stack: TinyStack):
    assert gc(stack.cache).paths == ()
    assert all(one.cached for one in stack.builds(Runner()))


def test_unused_trees_go_with_what_only_they_hold(
    stack: TinyStack, monkeypatch: pytest.MonkeyPatch
):
    base, tip = stack.builds(Runner())
    (base.installed / "vllm/__pycache__").mkdir(exist_ok=True)
    for module in ("value", "platforms"):
        name = f"vllm/__pycache__/{module}.cpython-311.pyc"
        (base.installed / name).touch()
    collect(stack.cache, base)
    for home in stack.cache.builds.iterdir():
        age(home, 20)
    monkeypatch.setattr("xpustack.cache_contents.RECENT", -1.0)
    before = on_disk(stack.cache.root)
    planned = gc(stack.cache, builds=[tip.key], dry_run=True)
    assert on_disk(stack.cache.root) == before
    done = gc(stack.cache, builds=[tip.key])
    assert done == planned and f"builds/{base.key}" in done.paths
    assert before - on_disk(stack.cache.root) == pytest.approx(done.bytes, abs=8192)
    assert [home.name for home in stack.cache.builds.iterdir()] == [tip.key]
    again = stack.builds(Runner())
    assert [one.cached for one in again] == [False, True]
    assert gc(stack.cache, builds=[one.key for one in again]).paths == ()


def test_old_formats_results_and_archives_go(stack: TinyStack):
    wheel = stack.cache.root / "wheels/key/any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"x" * 10000)
    for key in ("old", "new"):
        stack.cache.results_put(key, {})
    age(stack.cache.results / "ol/old.json", 30)
    kept, lost = sorted(path.name for path in stack.cache.sdists.iterdir())
    for name in (kept, lost):
        age(stack.cache.sdists / name, 30)
    done = gc(stack.cache, sdists=[kept])
    assert done.paths == ("wheels", f"sdists/{lost}", "results/ol/old.json")
    assert done.bytes >= 12288
    assert stack.cache.results_get("new") == {}
