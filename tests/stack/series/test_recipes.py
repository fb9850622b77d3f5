# SPDX-License-Identifier: Apache-2.0
"""Runs the recipes of CONTRIBUTING.md verbatim, on a small stack and on v0.33.0."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_stack import ATTENTION, FakeStack, edited
from fenced import block

from stack.core.cache import Cache
from stack.core.project import Project
from stack.series.order import read_patches
from stack.series.patch import load_series

ROOT = Path(__file__).parents[3]
PAGE = "CONTRIBUTING.md"
REAL, STEP = "v0.33.0", "query-norm"


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


@dataclass(frozen=True)
class RealStack:
    """A copy of this project's patches and what they name, with the machine's cache."""

    root: Path
    project: Project
    cache: Cache


@pytest.fixture
def real(tmp_path: Path, real_cache: Cache) -> RealStack:
    project = tmp_path / "project"
    for name in ("patches", "vllm_overlay", "kernels", "tests/steps"):
        shutil.copytree(ROOT / name, project / name)
    shutil.copy(ROOT / "releases.toml", project)
    return RealStack(tmp_path, Project(project), real_cache)


def follow(
    stack: FakeStack | RealStack,
    name: str,
    editor: str,
    sequence: str = "true",
    slug: str = "first",
    release: str = "v1.0",
    file: str = "vllm/attention.py",
) -> str:
    """Run a recipe with scripted editors; return what it printed."""
    tools = stack.root / "tools"
    tools.mkdir()
    message = stack.root / "message"
    message.write_text(block(PAGE, "message"))
    scripts = {
        "xpustack": f'exec {sys.executable} -m xpustack "$@"',
        "edit": editor,
        "arrange": sequence,
    }
    for script, body in scripts.items():
        path = tools / script
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XPUSTACK_CACHE": str(stack.cache.root),
        "RELEASE": release,
        "DIR": str(stack.root / "work"),
        "OTHER": "v2.0",
        "THERE": str(stack.root / "there"),
        "MESSAGE": str(message),
        "SLUG": slug,
        "FILE": file,
        "KERNEL": "kernels/xpu_dsv4/decode.py",
        "EDITOR": "edit",
        "GIT_EDITOR": "true",
        "GIT_SEQUENCE_EDITOR": "arrange",
    }
    for role in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{role}_NAME"] = "Me"
        environment[f"GIT_{role}_EMAIL"] = "me@localhost"
    done = subprocess.run(
        ["sh", "-ex", "-c", block(PAGE, name)],
        cwd=stack.project.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_add(stack: FakeStack) -> None:
    text = edited(edited(edited(ATTENTION, 5), 7), 20)
    (stack.root / "text").write_text(text)
    follow(
        stack,
        "add",
        f'cp {stack.root}/text "$1"; echo NEW = 1 > "$(dirname "$1")/new.py"',
    )
    step = load_series(stack.project, "v1.0")[-1]
    assert step.slug == "my-step" and step.touched == ("vllm/attention.py",)
    assert step.trailers.overlay == ("vllm/new.py",)
    assert (stack.project.overlay / "common/vllm/new.py").is_file()
    assert stack.trees()[-1].index == 4


def test_change(stack: FakeStack) -> None:
    before = {slug: stack.patch(slug).read_bytes() for slug in stack.slugs()}
    follow(stack, "change", "sed -i 's/line 2$/line two/' \"$1\"")
    changed = [
        slug for slug, mail in before.items() if stack.patch(slug).read_bytes() != mail
    ]
    assert changed == ["first"]
    assert b"+attention line two" in stack.patch("first").read_bytes()
    assert b"line two" not in stack.patch("second").read_bytes()
    assert stack.trees()[-1].index == 3


def test_port(stack: FakeStack) -> None:
    """`second` goes to a release that has `first` alone."""
    order = stack.project.series_dir("v1.0") / "series"
    first = next(line for line in order.read_text().splitlines() if "first/" in line)
    stack.write("patches/v2.0/series", f"{first}\n")
    stack.rederive()
    stack.apply()
    follow(stack, "port", "true", slug="second")
    assert stack.slugs("v2.0") == ["first", "second"]


def test_reorder(stack: FakeStack) -> None:
    last_first = """awk '/^pick/ && ++n == 3 {print; next} {rest = rest $0 "\\n"} \
END {printf "%s", rest}' "$1" > "$1.new" && mv "$1.new" "$1\""""
    follow(stack, "reorder", "true", last_first)
    assert stack.slugs() == ["third", "first", "second"]
    assert [tree.index for tree in stack.trees()] == [0, 1, 2, 3]


def test_drop(stack: FakeStack) -> None:
    follow(stack, "drop", "true", 'sed -i 3d "$1"', "third")
    assert stack.slugs() == ["first", "second"]
    assert not stack.patch("third").exists()
    assert not (stack.project.overlay / "common/vllm/xpu/layer.py").exists()


def test_edit(stack: FakeStack) -> None:
    before = stack.trees()
    output = follow(stack, "edit", 'echo "# faster" >> "$1"')
    assert "v1.0: trees recorded from third on: 1" in output
    after = stack.trees()
    assert [tree.tree_id for tree in after[:3]] == [tree.tree_id for tree in before[:3]]
    assert after[3].tree_id != before[3].tree_id


def test_change_on_the_real_series(real: RealStack) -> None:
    """One comment of a step, which the tag of its commit finds."""
    patches = read_patches(real.project, REAL)
    before = {slug: path.read_text() for slug, path in patches.items()}
    module = re.search(r"^\+\+\+ b/(\S+)$", before[STEP], re.MULTILINE)
    comment = re.search(r"^\+ +# (.*)$", before[STEP], re.MULTILINE)
    assert module is not None and comment is not None
    editor = f'sed -i "s/{comment[1]}/{comment[1]} So be it./" "$1"'
    follow(real, "change", editor, slug=STEP, release=REAL, file=module[1])
    after = read_patches(real.project, REAL)
    assert list(after) == list(before)
    assert "So be it." in after[STEP].read_text()
