# SPDX-License-Identifier: Apache-2.0
"""One wheel per tree, with the tree in its version, built once."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tiny_stack import BASE, TinyStack

from stack.base.store import Store
from stack.builds.build import NO_COMPILER, backend_server, build, build_version
from stack.core.errors import CheckFailed
from stack.core.process import Runner, Stopped, clean_environment
from stack.forks.server import Server


def test_a_tree_is_built_installed_and_kept(tiny: TinyStack):
    base, tip = tiny.builds(Runner())
    assert base.version == "1.0+xpu.dsv4.1.step0"
    assert tip.version == "1.0+xpu.dsv4.1"
    assert (
        "Version: 1.0+xpu.dsv4.1\n"
        in next(
            tip.installed.glob("vllm-1.0+xpu.dsv4.1.dist-info/METADATA")
        ).read_text()
    )
    assert "VALUE = 2" in (tip.installed / "vllm/value.py").read_text()
    assert "VALUE = 1" in (base.installed / "vllm/value.py").read_text()
    assert all(again.cached for again in tiny.builds(Runner()))


def test_a_build_that_fails_leaves_nothing_and_shows_why(tmp_path):
    stack = TinyStack(tmp_path)
    stack.add("break-it", {"setup.py": "raise SystemExit('the build is broken')\n"})
    tree = stack.trees()[1]
    with (
        closing(backend_server(Runner())) as server,
        pytest.raises(CheckFailed, match="the build failed") as caught,
    ):
        build(server, Store(stack.cache), tree, build_version(tree, 1))
    assert "the build is broken" in "\n".join(caught.value.detail)
    assert caught.value.step == "break-it"
    assert not stack.cache.builds.exists()
    assert list((stack.cache.root / "scratch").iterdir()) == []


def test_a_wheel_of_another_version_is_refused(tmp_path, backend: Server):
    stack = TinyStack(tmp_path)
    script = BASE["setup.py"].replace("version=version", "version='7'")
    stack.add("rename-it", {"setup.py": script})
    tree = stack.trees()[1]
    with pytest.raises(CheckFailed, match="one wheel of version"):
        build(backend, Store(stack.cache), tree, build_version(tree, 1))


def test_a_stopped_runner_starts_nothing(tmp_path):
    stack = TinyStack(tmp_path)
    runner = Runner()
    runner.stop()
    tree = stack.trees()[0]
    with pytest.raises(Stopped), closing(backend_server(runner)) as server:
        build(server, Store(stack.cache), tree, build_version(tree, 0))
    assert not any(stack.cache.builds.glob("*"))


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_cmake_without_a_working_compiler_is_understood(tmp_path: Path, compiler: str):
    """CMake's own message, which another version may word differently."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(x LANGUAGES CXX)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cmake", "-G", "Ninja", "-B", "build", "."],
        cwd=tmp_path,
        env={**clean_environment(), "CXX": compiler},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert NO_COMPILER.search(done.stdout + done.stderr), done.stderr
