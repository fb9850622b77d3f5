# SPDX-License-Identifier: Apache-2.0
"""A release leaves the stack, others stay as they are, and its wheel can still be
built."""

import shutil
from pathlib import Path

import pytest
from fake_stack import FakeStack, git

from stack.base.releases import load
from stack.core.errors import StackError, UsageError
from stack.core.repository import Repository
from stack.refresh.retire import retire
from stack.release.retired import checkout_of
from stack.series.order import read_patches, unnamed

ROWS = "release,found\nv1.0,old\nv2.0,new\n"


def committed(stack: FakeStack) -> str:
    root = stack.project.root
    if not (root / ".git").is_dir():
        git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "The stack")
    return git(root, "rev-parse", "HEAD").strip()


@pytest.fixture
def two(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """v1.0 and v2.0 share `first`; v2.0 has its own `second`, v1.0 alone `third`."""
    stack = three_steps.copy(tmp_path)
    shutil.copytree(stack.project.series_dir("v1.0"), stack.project.series_dir("v2.0"))
    order = stack.project.series_dir("v2.0") / "series"
    lines = order.read_text().splitlines(keepends=True)
    order.write_text("# why\n" + "".join(lines[:2]))
    stack.split("second", "v2.0")
    stack.write("tests/steps/test_old.py", "def test_old(): pass\n")
    third = stack.patch("third")
    told = third.read_bytes().replace(b"test_any.py", b"test_old.py")
    kernels = b"Kernels: decode\n"
    third.write_bytes(told.replace(kernels, kernels + b"Kernels: kv/gather\n"))
    (third.parent / "request.md").write_text("## Overview\n")
    stack.write("standins/emulated_xpu/schemas/1.txt", "")
    stack.write("kernels/reference/decode.py", "")
    stack.write("tests/kernels/test_decode.py", "")
    stack.write("kernels/reference/kv/gather.py", "")
    stack.write("tests/kernels/kv/test_gather.py", "")
    stack.write("docs/data/rows.csv", ROWS)
    stack.rederive()
    return stack


def test_what_it_alone_used_goes_with_it(two: FakeStack) -> None:
    kept = two.series("v2.0").tip.tree_id
    commit = committed(two)
    changed = retire(two.project, two.cache, ["v1.0"])
    assert {str(file.path) for file in changed if file.kind == "removed"} == {
        "kernels/reference/decode.py",
        "kernels/reference/kv/gather.py",
        "kernels/xpu_dsv4/_launch.py",
        "kernels/xpu_dsv4/_triton.py",
        "kernels/xpu_dsv4/__init__.py",
        "kernels/xpu_dsv4/decode.py",
        "kernels/xpu_dsv4/kv/__init__.py",
        "kernels/xpu_dsv4/kv/gather.py",
        "patches/first/v1.0.patch",
        "patches/second/v1.0.patch",
        "patches/third/request.md",
        "patches/third/v1.0.patch",
        "patches/v1.0/series",
        "patches/v1.0/trees",
        "tests/kernels/kv/test_gather.py",
        "tests/kernels/test_decode.py",
        "tests/steps/test_old.py",
        "vllm_overlay/common/vllm/xpu/layer.py",
    }
    assert (two.project.root / "tests/steps/test_any.py").is_file()
    assert not two.project.series_dir("v1.0").exists()
    assert not two.patch("third", "v2.0").parent.exists()
    assert unnamed(two.project) == []
    names = [path.name for path in read_patches(two.project, "v2.0").values()]
    assert names == ["v2.0.patch", "v2.0.patch"]
    assert two.series("v2.0").tip.tree_id == kept
    order = two.project.series_dir("v2.0") / "series"
    assert order.read_text().startswith("# why\n")
    data = two.project.root / "docs/data"
    assert (data / "rows.csv").read_text() == "release,found\nv2.0,new\n"
    pinned = load(two.project)
    assert pinned.names == ("v2.0",)
    assert [(old.name, old.commit) for old in pinned.retired] == [("v1.0", commit)]


def test_every_command_that_names_it_says_what_to_do(two: FakeStack) -> None:
    commit = committed(two)
    retire(two.project, two.cache, ["v1.0"])
    with pytest.raises(UsageError, match="is retired") as caught:
        two.releases["1.0"]
    assert f"git worktree add DIR {commit[:12]}" in (caught.value.hint or "")
    assert "xpustack build v1.0" in (caught.value.hint or "")


def test_its_files_are_taken_from_history(two: FakeStack) -> None:
    committed(two)
    before = two.contents()
    retire(two.project, two.cache, ["v1.0"])
    committed(two)
    (old,) = two.releases.retired
    place = checkout_of(two.project, two.cache, old)
    assert FakeStack.at(place.parent).project.root
    files = {
        name: (place / name).read_bytes() for name in before if ".git/" not in name
    }
    assert files == {name: before[name] for name in files}
    assert Repository(place / ".git").commit_of("HEAD") == old.commit


def test_a_shallow_clone_says_what_to_fetch(two: FakeStack, tmp_path: Path) -> None:
    committed(two)
    retire(two.project, two.cache, ["v1.0"])
    committed(two)
    shallow = tmp_path / "shallow"
    source = f"file://{two.project.root}"
    git(tmp_path, "clone", "--quiet", "--depth=1", source, str(shallow))
    (old,) = two.releases.retired
    project = type(two.project)(shallow)
    with pytest.raises(UsageError) as caught:
        checkout_of(project, two.cache, old)
    assert f"fetch --depth=1 origin {old.commit}" in (caught.value.hint or "")
    assert not list((two.cache.root / "checkouts").iterdir())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["v2.0"], "newest"),
        (["v1.0", "v2.0"], "newest"),
        (["v1.7"], "not a pinned release"),
        (["first"], "not a pinned release"),
    ],
)
def test_what_cannot_be_retired(two: FakeStack, names: list[str], says: str) -> None:
    committed(two)
    before = two.contents()
    with pytest.raises(StackError, match=says):
        retire(two.project, two.cache, names)
    assert two.contents() == before


def test_it_is_committed_first(two: FakeStack) -> None:
    with pytest.raises(UsageError, match="no git checkout"):
        retire(two.project, two.cache, ["v1.0"])
    committed(two)
    two.write("docs/data/rows.csv", ROWS + "v1.0,more\n")
    with pytest.raises(UsageError, match="differ") as caught:
        retire(two.project, two.cache, ["v1.0"])
    assert any("rows.csv" in line for line in caught.value.detail)


def test_once_retired_it_cannot_be_retired_again(two: FakeStack) -> None:
    committed(two)
    retire(two.project, two.cache, ["v1.0"])
    committed(two)
    with pytest.raises(UsageError, match="is retired"):
        retire(two.project, two.cache, ["v1.0"])
