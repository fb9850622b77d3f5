# SPDX-License-Identifier: Apache-2.0
"""One patch for all releases on which a step is the same: a change of it is one edit,
and a release that cannot take it keeps a variant of its own."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fake_stack import ATTENTION, FakeStack, commit, edited, git

from stack.core.errors import SourceError
from stack.series.order import users
from stack.series.recorded import read_trees
from stack.series.save import save
from stack.series.static import check_static

MOVED = "new line\n" * 4 + ATTENTION
"""The file of a release in which all lines are four lines further down."""


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """v1.0, v2.0 and v3.0 share the steps; in v3.0 their lines stand elsewhere."""
    stack = three_steps.copy(tmp_path)
    stack.three_steps("v2.0")
    stack.publish("3.0", {"vllm/attention.py": MOVED})
    stack.step("first", {"vllm/attention.py": edited(MOVED, 9)}, "", "v3.0")
    both = edited(edited(MOVED, 9), 11)
    stack.step("second", {"vllm/attention.py": both}, "", "v3.0")
    return stack


def amend(stack: FakeStack, release: str, old: str, new: str, **options) -> list[str]:
    """Change a line of the first step's commit, and save; returns what save says."""
    work = stack.apply(f"amend-{release}", release)
    path = work / "vllm/attention.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    git(work, "commit", "-qa", "--fixup", ":/Do first")
    quietly = ("-c", "sequence.editor=true")
    git(work, *quietly, "rebase", "-q", "--interactive", "--autosquash", "base")
    said: list[str] = []
    cache = replace(stack.cache, progress=said.append)
    save(stack.project, cache, work, **options)
    return [line for line in said if not line.startswith("applying")]


def tip(stack: FakeStack, release: str) -> str:
    """The file after the last step of a release."""
    work = stack.apply(f"tip-{release}", release)
    text = (work / "vllm/attention.py").read_text()
    shutil.rmtree(work)
    return text


def test_releases_share_a_patch_whose_lines_are_elsewhere(stack: FakeStack) -> None:
    names = sorted(
        path.relative_to(stack.project.patches).as_posix()
        for path in stack.project.patches.rglob("*.patch")
    )
    assert names == ["first/v1.0.patch", "second/v1.0.patch", "third/v1.0.patch"]
    assert users(stack.patch("first")) == ["v1.0", "v2.0", "v3.0"]
    for release in ("v1.0", "v2.0", "v3.0"):
        ids = {tree.slug: tree.tree_id for tree in stack.series(release).steps}
        assert ids == read_trees(stack.project, release)
        assert stack.save(stack.apply(f"same-{release}", release)) == []
    assert check_static(stack.project) == []


def test_one_edit_changes_a_step_everywhere(stack: FakeStack) -> None:
    said = amend(stack, "v2.0", "line 5 changed", "line 5 improved")
    assert said == [
        "first: also changed for v1.0, v3.0",
        "second: also changed for v1.0, v3.0",
    ]
    for release in ("v1.0", "v2.0", "v3.0"):
        assert "line 5 improved\n" in tip(stack, release)
        assert "line 7 changed\n" in tip(stack, release)
    # The context of the second step changed with it, for all.
    assert users(stack.patch("second")) == ["v1.0", "v2.0", "v3.0"]
    assert len(list(stack.project.patches.rglob("*.patch"))) == 3


def test_a_release_takes_the_change_of_the_steps_that_it_has(
    stack: FakeStack,
) -> None:
    """v3.0 has no third step."""
    work = stack.apply("work", "v1.0")
    for path, line, slug in (
        ("vllm/attention.py", "line 5", "first"),
        ("vllm/rope.py", "line 3", "third"),
    ):
        text = (work / path).read_text()
        (work / path).write_text(text.replace(f"{line} changed", f"{line} improved"))
        git(work, "commit", "-qa", "--fixup", f":/Do {slug}")
    quietly = ("-c", "sequence.editor=true")
    git(work, *quietly, "rebase", "-q", "--interactive", "--autosquash", "base")
    stack.save(work)
    assert users(stack.patch("first")) == ["v1.0", "v2.0", "v3.0"]
    assert users(stack.patch("third")) == ["v1.0", "v2.0"]
    assert "line 5 improved\n" in tip(stack, "v3.0")


def test_a_release_that_a_change_breaks_keeps_its_own_variant(stack: FakeStack) -> None:
    """The change reaches a line that v3.0 has in another form."""
    text = MOVED.replace("attention line 9\n", "another line 9\n")
    stack.publish("4.0", {"vllm/attention.py": text})
    stack.step("first", {"vllm/attention.py": edited(text, 9)}, "", "v4.0")
    before = stack.trees("v4.0")[-1].tree_id
    said = amend(stack, "v1.0", "attention line 9\n", "attention line 9 too\n")
    assert said[0].startswith("v4.0: first keeps the old text, as a variant of its own")
    assert said[1] == "first: also changed for v2.0, v3.0"
    assert users(stack.patch("first", "v4.0")) == ["v4.0"]
    assert stack.patch("first", "v4.0").name == "v4.0.patch"
    assert stack.trees("v4.0")[-1].tree_id == before
    assert "attention line 9 too\n" in tip(stack, "v3.0")


@pytest.fixture
def variant(stack: FakeStack) -> FakeStack:
    """v4.0 has a variant of the first step: before the changed line stands another."""
    text = MOVED.replace("attention line 3\n", "another line 3\n")
    stack.publish("4.0", {"vllm/attention.py": text})
    stack.step("first", {"vllm/attention.py": edited(text, 9)}, "", "v4.0")
    assert users(stack.patch("first", "v4.0")) == ["v4.0"]
    return stack


def test_a_variant_takes_a_change_of_the_lines_that_it_has(variant: FakeStack) -> None:
    said = amend(variant, "v1.0", "line 5 changed", "line 5 improved\nand a line more")
    assert "first: also changed in the variant of v4.0" in said
    assert users(variant.patch("first", "v4.0")) == ["v4.0"]
    text = tip(variant, "v4.0")
    assert "line 5 improved\nand a line more\n" in text and "another line 3\n" in text
    assert variant.save(variant.apply("same", "v4.0")) == []
    assert check_static(variant.project) == []


def test_a_variant_takes_a_change_of_the_message(variant: FakeStack) -> None:
    work = variant.apply("work", "v1.0", upto="first")
    text = git(work, "log", "-1", "--format=%B").replace("Why first", "Why indeed")
    git(work, "commit", "-q", "--amend", "-F", "-", text=text)
    variant.save(work)
    for release in ("v1.0", "v4.0"):
        assert b"Why indeed" in variant.patch("first", release).read_bytes()


def test_a_variant_in_which_other_lines_stand_keeps_its_text(
    variant: FakeStack,
) -> None:
    before = variant.patch("first", "v4.0").read_bytes()
    said = amend(variant, "v1.0", "attention line 3\n", "attention line 3 too\n")
    (kept,) = (line for line in said if "keeps its variant" in line)
    assert kept.startswith("first: v4.0 keeps its variant")
    assert variant.patch("first", "v4.0").read_bytes() == before


def test_alone_leaves_variants_alone(variant: FakeStack) -> None:
    before = variant.patch("first", "v4.0").read_bytes()
    amend(variant, "v1.0", "line 5 changed", "line 5 improved", alone=True)
    assert variant.patch("first", "v4.0").read_bytes() == before


def test_a_release_whose_later_step_breaks_keeps_its_own_variant(
    stack: FakeStack,
) -> None:
    text = tip(stack, "v3.0")
    stack.step("own", {"vllm/attention.py": edited(text, 18)}, "", "v3.0")
    before = stack.trees("v3.0")[-1].tree_id
    said = amend(stack, "v1.0", "attention line 12\n", "attention line 12 too\n")
    (kept,) = (line for line in said if "keeps the old text" in line)
    assert kept.startswith("v3.0: first") and "own: hunk 1 of 1" in kept
    assert users(stack.patch("first")) == ["v1.0", "v2.0"]
    assert stack.trees("v3.0")[-1].tree_id == before


def test_the_oldest_release_that_splits_off_gives_its_name_away(
    stack: FakeStack,
) -> None:
    amend(stack, "v1.0", "line 5 changed", "line 5 of v1.0", alone=True)
    assert users(stack.patch("first", "v1.0")) == ["v1.0"]
    shared = stack.patch("first", "v2.0")
    assert (shared.name, users(shared)) == ("v2.0.patch", ["v2.0", "v3.0"])
    assert "line 5 changed\n" in tip(stack, "v2.0")
    # The same change on the others makes them share again.
    amend(stack, "v3.0", "line 5 changed", "line 5 of v1.0")
    assert users(stack.patch("first")) == ["v1.0", "v2.0", "v3.0"]
    assert check_static(stack.project) == []


def test_a_message_is_shared_too(stack: FakeStack) -> None:
    work = stack.apply("work", "v2.0")
    git(work, "reset", "-q", "--hard", "HEAD~2")
    text = git(work, "log", "-1", "--format=%B").replace("Why first", "Why indeed")
    git(work, "commit", "-q", "--amend", "-F", "-", text=text)
    git(work, "cherry-pick", "HEAD@{2}~1", "HEAD@{2}")
    stack.save(work)
    assert b"Why indeed" in stack.patch("first").read_bytes()
    assert users(stack.patch("first")) == ["v1.0", "v2.0", "v3.0"]


def test_an_edited_kernel_changes_the_trees_of_all(stack: FakeStack) -> None:
    work = stack.apply("work", "v1.0")
    kernel = "vllm/model_executor/kernels/xpu_dsv4/_launch.py"
    (work / kernel).write_text("OPTIONS = 2\n")
    git(work, "commit", "-qa", "--amend", "--no-edit")
    assert stack.save(work) == [
        "changed patches/v1.0/trees",
        "changed patches/v2.0/trees",
        "changed kernels/xpu_dsv4/_launch.py",
    ]
    assert stack.trees("v2.0")[-1].index == 3


def test_a_base_that_a_shared_change_needs_is_named(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written while a tree of another release is unknown."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    work = stack.apply("work", "v1.0", upto="first")
    shutil.rmtree(stack.cache.objects)
    shutil.rmtree(stack.cache.sdists / stack.releases["v2.0"].sha256)
    text = edited(edited(ATTENTION, 5), 20)
    (work / "vllm/attention.py").write_text(text)
    git(work, "commit", "-qa", "--amend", "--no-edit")
    before = stack.contents()
    with pytest.raises(SourceError) as caught:
        stack.save(work)
    assert caught.value.release == "v2.0"
    assert stack.contents() == before


def test_a_step_leaves_one_release_alone(stack: FakeStack) -> None:
    work = stack.apply("work", "v1.0")
    git(work, "reset", "-q", "--hard", "HEAD~1")
    assert stack.save(work, drop=("third",)) == [
        "removed patches/third/v1.0.patch",
        "new patches/third/v2.0.patch",
        "changed patches/v1.0/series",
        "changed patches/v1.0/trees",
        "changed patches/v2.0/series",
    ]
    assert (stack.project.overlay / "common/vllm/xpu/layer.py").is_file()
    assert check_static(stack.project) == []


@pytest.mark.skipif(shutil.which("quilt") is None, reason="quilt is not installed")
def test_quilt_pushes_a_series(stack: FakeStack) -> None:
    work = stack.apply("work", "v3.0", upto="base")
    order = stack.project.series_dir("v3.0") / "series"
    order.write_text("# two steps\n\n" + order.read_text())
    done = subprocess.run(
        ["quilt", "push", "-a"],
        cwd=work,
        env={
            **os.environ,
            "QUILT_PATCHES": str(stack.project.patches),
            "QUILT_SERIES": str(order),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "vllm/attention.py").read_text() == tip(stack, "v3.0")


def test_git_applies_a_patch_as_a_mail(stack: FakeStack) -> None:
    work = stack.apply("work", "v3.0", upto="base")
    mail = f"From: Me <me@localhost>\n{stack.patch('first').read_text()}"
    git(work, "am", "--keep-non-patch", text=mail)
    assert "attention line 5 changed" in (work / "vllm/attention.py").read_text()


def test_a_commit_of_the_second_step_alone_is_for_all(stack: FakeStack) -> None:
    work = stack.apply("work", "v3.0")
    commit(work, "fourth", {"vllm/rope.py": "x\n"})
    stack.save(work)
    assert stack.slugs("v1.0") == ["first", "second", "third"]
    assert stack.slugs("v3.0") == ["first", "second", "fourth"]
