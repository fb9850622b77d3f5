# SPDX-License-Identifier: Apache-2.0
"""Work repositories: complete or absent, and never a loss of a person's work."""

import shutil
from pathlib import Path

import pytest
from fake_stack import BASE, FakeStack, commit, git

from stack.core.checkout import check_out
from stack.core.errors import SeriesError, UsageError
from stack.series import worktree


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def test_a_tree_as_plain_files(stack: FakeStack) -> None:
    target = stack.root / "plain"
    check_out(stack.cache, stack.trees()[0].tree_id, target)
    files = {
        str(path.relative_to(target)): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    expected = {path: text.encode() for path, text in BASE.items()}
    assert files == {**expected, "VERSION": b"1.0", "run.sh": b""}
    assert (target / "run.sh").stat().st_mode & 0o100
    assert (target / "README").is_symlink()


def test_a_repository_of_base_and_steps(stack: FakeStack) -> None:
    work = stack.apply()
    trees = stack.trees()
    log = git(work, "log", "--reverse", "--format=%H").split()
    assert log == [tree.commit for tree in trees]
    assert git(work, "rev-parse", "base").strip() == trees[0].commit
    tagged = [git(work, "rev-parse", f"step/{slug}").strip() for slug in stack.slugs()]
    assert tagged == log[1:]
    assert git(work, "status", "--porcelain", "--ignored") == ""
    text = git(work, "log", "-1", "--format=%B")
    assert text.startswith("[XPU][DSv4] Do third\n") and "Step: third\n" in text
    assert "Overlay: vllm/xpu/layer.py\nKernels: decode\n" in text


def test_it_outlives_the_cache(stack: FakeStack) -> None:
    work = stack.apply()
    shutil.rmtree(stack.cache.objects)
    git(work, "fsck", "--strict")
    assert "rope line 3 changed" in git(work, "show", "HEAD")


def test_upto_stops_early(stack: FakeStack) -> None:
    work = stack.apply(upto="second")
    assert len(git(work, "log", "--format=%h").split()) == 3
    with pytest.raises(UsageError, match="did you mean second"):
        stack.apply("other", upto="secnd")
    assert not (stack.root / "other").exists()


def test_an_unchanged_result_is_replaced(stack: FakeStack) -> None:
    work = stack.apply(upto="first")
    stack.apply()
    assert (work / "vllm/xpu/layer.py").is_file()
    assert {path.name for path in stack.root.iterdir()} == {"project", "cache", "work"}


@pytest.mark.parametrize("change", ["edit", "new", "ignored", "commit", "branch"])
def test_changed_results_are_refused(stack: FakeStack, change: str) -> None:
    work = stack.apply()
    if change == "commit":
        commit(work, "fourth", {"vllm/rope.py": "x\n"})
    elif change == "branch":
        commit(work, "fourth", {"vllm/rope.py": "x\n"})
        git(work, "branch", "mine")
        git(work, "reset", "-q", "--hard", "HEAD~1")
    else:
        names = {"edit": "vllm/rope.py", "new": "vllm/new.py", "ignored": "my.log"}
        (work / names[change]).write_text("mine\n")
    before = git(work, "rev-parse", "HEAD")
    with pytest.raises(UsageError, match="holds work") as caught:
        stack.apply()
    assert caught.value.detail
    assert git(work, "rev-parse", "HEAD") == before


def test_a_directory_of_someone_else_is_refused(stack: FakeStack) -> None:
    other = stack.root / "work"
    other.mkdir()
    (other / "mine").write_text("mine\n")
    with pytest.raises(UsageError, match="not made by xpustack apply"):
        stack.apply()
    assert [path.name for path in other.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = stack.apply()
    before = git(work, "rev-parse", "HEAD")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worktree, "fill", stop)
    with pytest.raises(KeyboardInterrupt):
        stack.apply()
    with pytest.raises(KeyboardInterrupt):
        stack.apply("new")
    assert git(work, "rev-parse", "HEAD") == before
    stack.patch("first").unlink()
    with pytest.raises(SeriesError):
        stack.apply("new")
    assert {path.name for path in stack.root.iterdir()} == {"project", "cache", "work"}
