# SPDX-License-Identifier: Apache-2.0
"""Byte code that trees share: only the tool makes it, and it is never stale."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_stack import TinyStack

from xpustack.builds import bytecode
from xpustack.builds.build import Build
from xpustack.builds.bytecode import collect, load_index, provide
from xpustack.core.cache import Cache
from xpustack.core.contents import Content, Contents
from xpustack.core.process import Runner, clean_environment

ASK = "import vllm.value, vllm.platforms; print(vllm.value.VALUE)"
MODULES = ("__init__", "platforms", "value")


@pytest.fixture
def stack(tmp_path: Path, tiny: TinyStack) -> TinyStack:
    other = tiny.copy(tmp_path)
    for path in other.cache.builds.rglob("__pycache__/*"):
        path.unlink()
    shutil.rmtree(other.cache.bytecode, ignore_errors=True)
    return other


def imported(build: Build, *options: str) -> str:
    """The output of a Python that imports the tree; with `-v`, also what it reads."""
    process = subprocess.run(
        [sys.executable, *options, "-c", ASK],
        env=clean_environment(PYTHONPATH=str(build.installed)),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def byte_code(build: Build, module: str) -> Path:
    name = f"{module}.{sys.implementation.cache_tag}.pyc"
    return build.installed / "vllm" / "__pycache__" / name


def test_what_one_tree_imports_all_trees_have(stack: TinyStack):
    base, tip = stack.builds(Runner())
    imported(base)
    assert collect(stack.cache, base) == len(MODULES)
    assert provide(stack.cache, tip) == 2  # `value` differs.
    assert not byte_code(tip, "value").exists()
    text = imported(tip, "-v")
    for module in ("__init__", "platforms"):
        assert f"code object from '{byte_code(tip, module)}'" in text
    assert text.startswith("2")
    assert collect(stack.cache, tip) == 1
    assert provide(stack.cache, base) == provide(stack.cache, tip) == len(MODULES)
    assert (imported(base), imported(tip)) == ("1\n", "2\n")
    assert len(load_index(stack.cache)) == len(MODULES) + 1
    inodes = {byte_code(build, "platforms").stat().st_ino for build in (base, tip)}
    assert len(inodes) == 1


def test_byte_code_that_the_tool_did_not_make_goes(stack: TinyStack):
    base, tip = stack.builds(Runner())
    for build in (base, tip):
        imported(build)
        collect(stack.cache, build)
        provide(stack.cache, build)
    planted = byte_code(tip, "value").read_bytes()
    byte_code(base, "value").unlink()
    byte_code(base, "value").write_bytes(planted)
    byte_code(base, "gone").write_bytes(planted)
    (byte_code(base, "value").parent / "notes.txt").write_text("")
    provide(Cache(stack.cache.root), base)
    assert {path.name for path in byte_code(base, "value").parent.iterdir()} == {
        byte_code(base, module).name for module in MODULES
    }
    assert imported(base) == "1\n"


def test_python_itself_compares_source_and_byte_code(stack: TinyStack):
    """Not even a wrong index can give a module the byte code of another."""
    base, tip = stack.builds(Runner())
    imported(base)
    collect(stack.cache, base)
    provide(stack.cache, base)
    byte_code(tip, "value").parent.mkdir(exist_ok=True)
    byte_code(tip, "value").write_bytes(byte_code(base, "value").read_bytes())
    assert imported(tip) == "2\n"
    byte_code(base, "value").unlink()
    provide(stack.cache, base)
    assert imported(base) == "1\n"


def test_damaged_byte_code_is_not_handed_on(stack: TinyStack):
    base, _ = stack.builds(Runner())
    imported(base)
    collect(stack.cache, base)
    (content, *_) = load_index(stack.cache).values()
    path = stack.cache.contents.path(content)
    path.chmod(0o644)
    path.write_bytes(b"\0" * content.size)
    cache = Cache(stack.cache.root)
    assert provide(cache, base) == len(MODULES) - 1
    assert imported(base) == "1\n"
    (index,) = cache.bytecode.iterdir()
    index.write_bytes(index.read_bytes()[:-2])
    assert load_index(cache) == {}
    assert collect(cache, base) == len(MODULES)
    assert provide(Cache(stack.cache.root), base) == len(MODULES)


def test_two_checks_provide_for_one_tree_at_once(stack: TinyStack, monkeypatch):
    """The second comes while the first has a link under its temporary name."""
    base, _ = stack.builds(Runner())
    imported(base)
    collect(stack.cache, base)
    for module in MODULES:
        byte_code(base, module).unlink()
    other = Cache(stack.cache.root)
    second = threading.Thread(target=provide, args=(other, base))
    link = Contents.link

    def link_slowly(self: Contents, content: Content, target: Path) -> None:
        link(self, content, target)
        if threading.current_thread() is not second and second.ident is None:
            second.start()
            second.join(timeout=1)

    monkeypatch.setattr(Contents, "link", link_slowly)
    assert provide(stack.cache, base) == len(MODULES)
    second.join()
    assert all(byte_code(base, module).is_file() for module in MODULES)


def test_python_renames_its_own_file_meanwhile(stack: TinyStack, monkeypatch):
    """A test in the same tree writes byte code under a temporary name first."""
    base, _ = stack.builds(Runner())
    imported(base)
    collect(stack.cache, base)
    written = byte_code(base, MODULES[0]).with_suffix(".pyc.140399437872416")
    written.touch()
    present = bytecode._present

    def renamed(site: Path):
        for module, path in present(site):
            if path == written:
                written.unlink()
            yield module, path

    monkeypatch.setattr(bytecode, "_present", renamed)
    assert provide(stack.cache, base) == len(MODULES)
