# SPDX-License-Identifier: Apache-2.0
"""Damage of every kind ends in a clear error whose hint works. It never ends in a
traceback, nor with exit code 1, which says that a check failed."""

import errno
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import Call
from fake_stack import FakeStack

from stack.pages import status


def truncated_pack(stack: FakeStack) -> None:
    for pack in stack.cache.objects.glob("objects/pack/*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:200])


def deleted_objects(stack: FakeStack) -> None:
    for folder in stack.cache.objects.glob("objects/??"):
        shutil.rmtree(folder)


def no_repository(stack: FakeStack) -> None:
    (stack.cache.objects / "HEAD").unlink()


def objects_a_file(stack: FakeStack) -> None:
    shutil.rmtree(stack.cache.objects / "objects")
    (stack.cache.objects / "objects").write_text("a file\n")


def damaged_ref(stack: FakeStack) -> None:
    for ref in stack.cache.objects.glob("refs/bases/*"):
        ref.write_text("0" * 39 + "1\n")


@pytest.mark.parametrize(
    "damage",
    [truncated_pack, no_repository, objects_a_file, damaged_ref],
)
def test_a_damaged_store_is_named_and_can_be_made_anew(
    stack: FakeStack, call: Call, damage: Callable[[FakeStack], None]
) -> None:
    words = ("apply", "v1.0", "--to", stack.root / "work", "--offline")
    damage(stack)
    done = call(*words)
    assert done.exit_code == 5, done.output
    assert str(stack.cache.objects) in done.output
    assert "Traceback" not in done.output
    (hint,) = (line for line in done.stderr.splitlines() if "next: " in line)
    subprocess.run(hint.partition("next: ")[2].partition(", then")[0].split())
    assert not stack.cache.objects.exists()
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert (stack.root / "work/vllm/xpu/layer.py").is_file()


def test_lost_objects_of_steps_are_made_again(stack: FakeStack, call: Call) -> None:
    """Bases lie in packs; the recorded trees say that the steps are as they were."""
    deleted_objects(stack)
    done = call("apply", "v1.0", "--to", stack.root / "work", "--offline")
    assert done.exit_code == 0, done.output
    assert "applying v1.0 from first on" in done.output
    assert (stack.root / "work/vllm/xpu/layer.py").is_file()


@pytest.mark.parametrize("name", ["objects", "locks", "."])
def test_a_file_in_the_place_of_the_cache(
    stack: FakeStack, call: Call, name: str
) -> None:
    place = stack.cache.root / name
    shutil.rmtree(place)
    place.write_text("a file\n")
    words = ("apply", "v1.0", "--to", stack.root / "work")
    done = call(*words)
    assert done.exit_code == 5, done.output
    assert f"mv {place.resolve()} NEW_NAME" in done.output
    assert "Traceback" not in done.output
    place.rename(stack.root / "away")
    if name != ".":
        assert call(*words, "--offline").exit_code == 0


def folder(path: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / path).unlink()
        (root / path).mkdir()

    return damage


def latin1(root: Path) -> None:
    path = root / "patches/first/v1.0.patch"
    path.write_bytes(path.read_bytes().replace(b"Why first", b"Warum \xe4"))


def utf16(root: Path) -> None:
    path = root / "releases.toml"
    path.write_bytes(path.read_text().encode("utf-16"))


def utf16_series(root: Path) -> None:
    path = root / "patches/v1.0/series"
    path.write_bytes(path.read_text().encode("utf-16"))


def patches_a_file(root: Path) -> None:
    shutil.rmtree(root / "patches")
    (root / "patches").write_text("a file\n")


FAULTS = {
    "pins-utf16": (utf16, 3, "releases.toml:1", "not UTF-8"),
    "patch-latin1": (latin1, 4, "first/v1.0.patch:3", "not UTF-8"),
    "patch-folder": (
        folder("patches/second/v1.0.patch"),
        4,
        "second/v1.0.patch",
        "a folder is where a file must be",
    ),
    "series-folder": (folder("patches/v1.0/series"), 4, "series", "a folder is where"),
    "series-utf16": (utf16_series, 4, "series:1", "not a patch name"),
    "patches-file": (patches_a_file, 4, "patches", "a file is where a folder"),
    "overlay-folder": (
        folder("vllm_overlay/common/vllm/xpu/layer.py"),
        4,
        "third/v1.0.patch",
        "the overlay has no",
    ),
    "kernel-folder": (
        folder("kernels/xpu_dsv4/decode.py"),
        4,
        "third/v1.0.patch",
        "no kernel module",
    ),
}


@pytest.mark.parametrize(
    "words", [("apply", "v1.0", "--offline"), ("check", "--static")]
)
@pytest.mark.parametrize(
    ("damage", "code", "place", "text"), FAULTS.values(), ids=FAULTS
)
def test_a_damaged_file_is_named(
    stack: FakeStack,
    call: Call,
    words: tuple[str, ...],
    damage: Callable[[Path], None],
    code: int,
    place: str,
    text: str,
) -> None:
    damage(stack.project.root)
    done = call(*words)
    assert done.exit_code == (4 if "--static" in words else code), done.output
    assert text in done.output and place in done.output
    assert "next: " in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    "name",
    [
        "releases.toml",
        "patches/v1.0/series",
        "patches/second/v1.0.patch",
        "vllm_overlay/common/vllm/xpu/layer.py",
        "kernels/xpu_dsv4/decode.py",
    ],
)
def test_a_file_that_may_not_be_read_is_the_machines_fault(
    stack: FakeStack, call: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Root may read everything, so the system's refusal is simulated.
    plain = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == stack.project.root / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    done = call("apply", "v1.0", "--offline")
    assert done.exit_code == 5, done.output
    assert "Permission denied" in done.output and name in done.output
    assert f"next: ls -ld {stack.project.root / name}" in done.output


def test_what_nobody_foresaw_is_an_internal_error(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: object) -> None:
        raise RuntimeError("a surprise")

    monkeypatch.setattr(status, "checked_statuses", surprise)
    done = call("status")
    assert done.exit_code == 70
    assert done.stderr.startswith("error: internal error: RuntimeError: a surprise\n")
    assert "in surprise" in done.stderr and "report" in done.stderr
    (error,) = json.loads(call("status", "--json").stdout)["errors"]
    assert (error["error"], error["exit_code"]) == ("InternalError", 70)
    assert "70 a fault of the tool" in " ".join(call("--help").output.split())


def test_what_the_system_refuses_is_the_machines_fault(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/some/file")

    monkeypatch.setattr(status, "checked_statuses", surprise)
    done = call("status")
    assert done.exit_code == 5
    assert "Input/output error" in done.stderr and "/some/file" in done.stderr


@pytest.mark.parametrize(
    ("said", "code"),
    [("git version 2.34.1", 5), ("git version 2.38.0", 0), ("nonsense", 5)],
)
def test_git_is_new_enough_or_refused(
    stack: FakeStack,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    code: int,
) -> None:
    tools = stack.root / "tools"
    tools.mkdir()
    fake = tools / "git"
    real = shutil.which("git")
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = version ] && echo "{said}" && exit\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    done = call("apply", "v1.0", "--offline")
    assert done.exit_code == code, done.output
    if code:
        assert "git 2.38 or newer is needed" in done.output and said in done.output


def test_no_git_at_all(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (("apply", "v1.0", "--offline"), ("status",)):
        done = call(*words)
        assert done.exit_code == 5, done.output
        assert "git is not installed" in done.output


@pytest.mark.parametrize("damage", [truncated_pack, no_repository])
def test_a_damaged_store_is_no_failed_check(
    stack: FakeStack, call: Call, damage: Callable[[FakeStack], None]
) -> None:
    damage(stack)
    done = call("check", "v1.0", "--offline")
    assert done.exit_code == 5, done.output
    assert str(stack.cache.objects) in done.output


def test_the_base_is_no_step_to_check(call: Call) -> None:
    done = call("check", "v1.0", "base", "--offline")
    assert done.exit_code == 2, done.output
    assert "no step 'base'" in done.output
