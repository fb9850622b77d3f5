# SPDX-License-Identifier: Apache-2.0
"""Byte code that trees share: every module has it, and it is never stale."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_stack import TinyStack

from stack.builds.installed import (
    Build,
    byte_code_path,
    install,
    manifest_of,
    shared,
)
from stack.core.cache import Cache
from stack.core.process import Runner, clean_environment

ASK = "import vllm.value, vllm.platforms; print(vllm.value.VALUE)"
MODULES = ("vllm/__init__.py", "vllm/platforms.py", "vllm/value.py")


@pytest.fixture
def stack(tmp_path: Path, tiny: TinyStack) -> TinyStack:
    return tiny.copy(tmp_path)


def imported(build: Build) -> str:
    """What a Python says that imports the tree, and which byte code it reads."""
    process = subprocess.run(
        [sys.executable, "-v", "-c", ASK],
        env=clean_environment(PYTHONPATH=str(build.installed)),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def test_no_import_compiles_a_module_and_none_is_stale(stack: TinyStack):
    for build, value in zip(stack.builds(Runner()), "12", strict=True):
        text = imported(build)
        assert text.startswith(value)
        for module in MODULES:
            place = build.installed / byte_code_path(module)
            assert f"code object from '{place}'" in text
            assert f"wrote '{place}'" not in text


def test_trees_share_the_byte_code_of_a_content(stack: TinyStack):
    base, tip = (manifest_of(stack.cache, each.key) for each in stack.builds(Runner()))
    same = [base[byte_code_path(name)] == tip[byte_code_path(name)] for name in MODULES]
    assert base and tip and same == [True, True, False]


def test_python_itself_compares_source_and_byte_code(stack: TinyStack):
    """Not even a wrong link can give a module the byte code of another."""
    base, tip = stack.builds(Runner())
    wrong, right = (each.installed / byte_code_path(MODULES[2]) for each in (base, tip))
    wrong.unlink()
    wrong.write_bytes(right.read_bytes())
    assert imported(base).startswith("1")


SOURCES = {"a.py": b"A = 1\n", "bad.py": b"A = \n", "a.txt": b""}


def test_a_new_tree_links_what_the_newest_has_intact(cache: Cache):
    first, second = (cache.builds / name / "site" for name in ("first", "second"))
    assert shared(cache, SOURCES) == SOURCES
    install(cache, dict(SOURCES), first.parent)
    code = byte_code_path("a.py")
    assert [path.name for path in (first / code).parent.iterdir()] == [Path(code).name]
    links = {path: f"{first}/{path}" for path in ("a.py", code, "a.txt")}
    install(cache, dict(SOURCES), cache.builds / ".xpustack-1.part")
    assert shared(cache, SOURCES) == {"bad.py": SOURCES["bad.py"], **links}
    (first / code).chmod(0o644)
    (first / code).write_bytes(b"\0" * (first / code).stat().st_size)
    (first / code).chmod(0o444)
    again = Cache(cache.root)
    files = shared(again, SOURCES)
    assert files["a.py"] == SOURCES["a.py"] and code not in files
    install(again, files, second.parent)
    assert (second / code).read_bytes() != (first / code).read_bytes()
    assert (second / "a.txt").samefile(first / "a.txt")
