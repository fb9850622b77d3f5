# SPDX-License-Identifier: Apache-2.0
"""The cache: complete or absent, also when writers die or meet."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from children import killed, read_until, start

from stack.core import cache as cache_module
from stack.core.cache import (
    Cache,
    atomic_dir,
    atomic_file,
    replace_dir,
    sweep,
    writing,
)
from stack.core.errors import EnvironmentProblem, UsageError
from stack.core.progress import at_most_every


def temporaries(directory: Path) -> list[Path]:
    return list(directory.glob(".xpustack-*.part"))


@pytest.mark.parametrize(
    ("settings", "root"),
    [
        ({"XPUSTACK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/xpustack"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/xpustack"),
        ({}, "/home/someone/.cache/xpustack"),
        ({"XPUSTACK_CACHE": "~/c"}, "/home/someone/c"),
    ],
)
def test_the_default_place(
    settings: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("XPUSTACK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert Cache.default().root == Path(root)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    with pytest.raises(RuntimeError), atomic_file(target) as file:
        file.write(b"half")
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with atomic_file(target) as file:
        file.write(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_is_replaced_and_keeps_its_content_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_file(target) as file:
        file.write(b"new")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    with atomic_file(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new"


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    with pytest.raises(RuntimeError), atomic_dir(target) as directory:
        (directory / "a").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_dir(target) as directory:
        (directory / "a").write_text("whole")
        assert not target.exists()
    assert (target / "a").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_the_faster_of_two_directories_stays(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    with atomic_dir(target) as slow:
        (slow / "a").write_text("slow")
        with atomic_dir(target) as fast:
            (fast / "a").write_text("fast")
    assert (target / "a").read_text() == "fast"
    assert temporaries(tmp_path) == []


def test_a_directory_of_a_whole_tree_is_in_memory(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where there is no room."""
    monkeypatch.setattr(cache_module, "MEMORY", tmp_path / "shm")
    with cache.scratch(in_memory=True) as directory:
        assert directory.is_relative_to(cache.root)
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(cache_module, "MEMORY_FREE", 1)
    with cache.scratch(in_memory=True) as directory:
        own = directory.parent
        assert own == tmp_path / "shm" / f"xpustack-{os.getuid()}"
        assert own.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    with cache.scratch() as directory:
        assert directory.is_relative_to(cache.root)
    monkeypatch.setattr(cache_module, "MEMORY_FREE", 1 << 60)
    with cache.scratch(in_memory=True) as directory:
        assert directory.is_relative_to(cache.root)


def test_what_a_killed_run_left_in_memory_is_removed(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MEMORY", tmp_path)
    monkeypatch.setattr(cache_module, "MEMORY_FREE", 1)
    with cache.scratch(in_memory=True) as directory:
        left = directory.with_name(".xpustack-0123456789abcdef.part")
        (left / "vllm").mkdir(parents=True)
    cache.root.mkdir(parents=True, exist_ok=True)
    assert cache.sweep() == [left]
    assert not left.exists()


def test_a_link_in_place_of_the_folder_in_memory_is_not_followed(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MEMORY", tmp_path)
    monkeypatch.setattr(cache_module, "MEMORY_FREE", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"xpustack-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with cache.scratch(in_memory=True) as directory:
        assert directory.is_relative_to(cache.root)


def test_scratch_is_gone_after_its_block(cache: Cache) -> None:
    with cache.scratch() as directory:
        (directory / "a").write_text("x")
        assert directory.is_relative_to(cache.root)
    assert not directory.exists()


WRITER = """
from stack.core.cache import atomic_dir, atomic_file
target = Path(sys.argv[2])
with (atomic_dir if sys.argv[1] == "directory" else atomic_file)(target) as part:
    if sys.argv[1] == "directory":
        (part / "sub").mkdir()
        (part / "sub" / "a").write_text("half")
    else:
        part.write(b"half")
        part.flush()
    say("half")
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_killed_writer_is_swept_and_a_living_one_is_not(
    kind: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    child = start(WRITER, kind, target)
    read_until(child, "half")
    assert sweep(tmp_path) == []
    (living,) = temporaries(tmp_path)
    with atomic_file(tmp_path / "other") as file:
        file.write(b"x")
    assert temporaries(tmp_path) == [living]
    killed(child)
    assert not target.exists()
    assert sweep(tmp_path) == [living]
    assert temporaries(tmp_path) == []


def test_the_next_writer_sweeps_without_being_asked(tmp_path: Path) -> None:
    target = tmp_path / "target"
    child = start(WRITER, "directory", target)
    read_until(child, "half")
    killed(child)
    with atomic_dir(target) as directory:
        (directory / "a").write_text("whole")
    assert list(tmp_path.iterdir()) == [target]


def test_a_sweeper_between_creation_and_lock(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []

    def opened(path, flags, *rest, real=os.open, **named):
        if flags & os.O_DIRECTORY and not swept:
            swept.append(Path(path))
            Path(path).rmdir()
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)
    with cache.scratch() as directory:
        assert directory.is_dir() and [directory] != swept


def test_sweep_touches_nothing_but_its_own(tmp_path: Path) -> None:
    names = [".xpustack-0123.part", "xpustack-0123456789abcdef.part", ".git", "a.part"]
    for name in names:
        (tmp_path / name).write_text("mine")
    assert sweep(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == sorted(names)


SWAPPER = """
import os
from stack.core.cache import replace_dir
real = os.rename
def stopping(*names):
    if Path(names[1]).name == sys.argv[2]:
        say("now")
        time.sleep(60)
    real(*names)
os.rename = stopping
with replace_dir(Path(sys.argv[1])) as part:
    (part / "a").write_text("new")
"""


@pytest.mark.parametrize(("before", "left"), [("old", ["target"]), ("target", [])])
def test_a_kill_within_a_folder_swap_leaves_no_mixture(
    before: str, left: list[str], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("old")
    child = start(SWAPPER, target, before)
    read_until(child, "now")
    killed(child)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == left
    with replace_dir(target) as part:
        (part / "a").write_text("newer")
    assert (target / "a").read_text() == "newer"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_and_stays_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for text in ("old", "new"):
        with replace_dir(target) as part:
            (part / text).touch()
        with pytest.raises(RuntimeError), replace_dir(target) as part:
            (part / "half").touch()
            raise RuntimeError
        assert [path.name for path in target.iterdir()] == [text]
        assert list(tmp_path.iterdir()) == [target]


def test_the_faster_of_two_replacements_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    real = os.rename

    def rename(source: Path, place: Path) -> None:
        real(source, place)
        if place.name == "old":
            target.mkdir()
            (target / "faster").touch()

    with pytest.MonkeyPatch.context() as patch, replace_dir(target) as part:
        target.mkdir()
        (part / "slower").touch()
        patch.setattr(os, "rename", rename)
    assert [path.name for path in target.iterdir()] == ["faster"]
    assert list(tmp_path.iterdir()) == [target]


LEFT = """
cache = Cache(Path(sys.argv[1]))
from stack.core.cache import atomic_dir
with cache.scratch(), atomic_dir(cache.builds / "a"), atomic_dir(cache.sdists / "b/c"):
    say("half")
    time.sleep(60)
"""


def test_a_run_sweeps_what_killed_runs_left_in_any_folder(cache: Cache) -> None:
    child = start(LEFT, cache.root)
    read_until(child, "half")
    assert cache.sweep() == []
    killed(child)
    assert len(cache.sweep()) == 3
    assert list(cache.root.rglob("*.part")) == []


@pytest.mark.parametrize("below", ["", "below"])
def test_a_cache_that_is_a_file_is_an_environment_problem(
    below: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / below)
    assert cache.results_get("key") is None
    for use in (
        cache.scratch,
        lambda: cache.lock("a"),
        lambda: atomic_dir(cache.builds),
    ):
        with (
            pytest.raises(EnvironmentProblem, match="a file is where") as caught,
            use(),
        ):
            pass
        assert caught.value.path == str(tmp_path / "file")
        assert caught.value.hint
    with pytest.raises(EnvironmentProblem):
        cache.results_put("key", {})


LOCKED = """
with Cache(Path(sys.argv[1]), progress=say).lock("store"):
    say("held")
    if sys.argv[2] == "stay":
        time.sleep(60)
"""


def test_a_lock_excludes_another_process_until_its_holder_dies(cache: Cache) -> None:
    holder = start(LOCKED, cache.root, "stay")
    read_until(holder, "held")
    waiter = start(LOCKED, cache.root, "leave")
    read_until(waiter, "waiting for another run to release store")
    assert waiter.poll() is None
    killed(holder)
    output, _ = waiter.communicate(timeout=30)
    assert waiter.returncode == 0 and output == "held\n"


def test_two_locks_do_not_meet(cache: Cache) -> None:
    messages: list[str] = []
    cache = replace(cache, progress=messages.append)
    with cache.lock("one"), cache.lock("two"):
        pass
    assert messages == []


def test_a_result_is_kept_under_its_key(cache: Cache) -> None:
    key = "0a" * 32
    assert cache.results_get(key) is None
    cache.results_put(key, {"green": True, "lines": ["a"]})
    assert cache.results_get(key) == {"green": True, "lines": ["a"]}
    cache.results_put(key, {"green": False})
    assert cache.results_get(key) == {"green": False}


@pytest.mark.parametrize("damage", [b"", b'{"green": tr', b"\xff\xfe", b"[1]"])
def test_a_damaged_result_is_none(damage: bytes, cache: Cache) -> None:
    cache.results_put("key", {"green": True})
    (path,) = cache.results.rglob("*.json")
    assert json.loads(path.read_bytes()) == {"green": True}
    path.write_bytes(damage)
    assert cache.results_get("key") is None


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden"])
def test_a_name_cannot_leave_the_cache(name: str, cache: Cache) -> None:
    with pytest.raises(UsageError):
        cache.results_put(name, {})
    with pytest.raises(UsageError), cache.lock(name):
        pass
    assert not cache.root.exists()


@pytest.mark.parametrize(
    ("number", "says"),
    [(28, "disk is full"), (122, "disk is full"), (13, "not allowed"), (30, "allowed")],
)
def test_a_refusal_of_the_system_names_the_path(
    number: int, says: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentProblem, match=says) as caught, writing(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.path == str(tmp_path)
    assert os.strerror(number) in caught.value.detail


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing(tmp_path):
        raise FileNotFoundError(2, "gone")


def test_fast_messages_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("stack.core.progress.time.monotonic", lambda: now)
    messages: list[str] = []
    report = at_most_every(1.0, messages.append)
    for tenth in range(25):
        now = tenth / 10
        report(str(tenth))
    assert messages == ["10", "20"]


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "df -h"), (errno.EROFS, "ls -ld")]
)
def test_a_hint_can_be_pasted_into_a_shell(number: int, words: str):
    with pytest.raises(EnvironmentProblem) as caught, writing(Path("/my cache/a b/c")):
        raise OSError(number, "refused")
    assert caught.value.hint == f"{words} '/my cache/a b'"
