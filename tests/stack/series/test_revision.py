# SPDX-License-Identifier: Apache-2.0
"""The record of what a revision holds: what breaks it, and how `stamp` renews it."""

import os
from pathlib import Path

import pytest
from command_line import invoke
from fake_stack import ATTENTION, FakeStack, edited, git

from stack.core.errors import SeriesError
from stack.release.ship import ship
from stack.series import static
from stack.series.patch import load_series
from stack.series.revision import change, content, step_digests


def run(stack: FakeStack, *words: str, code: int = 0) -> str:
    words = ("-C", str(stack.project.root), *words)
    here = Path.cwd()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
            done = invoke(*words)
    finally:
        os.chdir(here)
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


@pytest.fixture
def stamped(stack: FakeStack) -> FakeStack:
    run(stack, "stamp", "--all")
    git(stack.project.root, "init", "--quiet")
    commit(stack)
    return stack


def commit(stack: FakeStack) -> None:
    git(stack.project.root, "add", "--all")
    git(stack.project.root, "commit", "--quiet", "--message", "stamp")


def problems(stack: FakeStack) -> list[str]:
    return [str(problem) for problem in static.check_static(stack.project)]


def edit_kernel(stack: FakeStack) -> None:
    stack.write("kernels/xpu_dsv4/_launch.py", "OPTIONS = 2\n")


def edit_overlay(stack: FakeStack) -> None:
    stack.write("vllm_overlay/common/vllm/xpu/layer.py", "LAYER = 2\n")


def edit_message(stack: FakeStack) -> None:
    path = stack.patch("second")
    path.write_text(path.read_text().replace("Why second.", "Why the second."))


def add_step(stack: FakeStack) -> None:
    stack.step("fourth", {"vllm/no_end.txt": "changed\n"})


def drop_step(stack: FakeStack) -> None:
    stack.patch("third").unlink()
    series = stack.project.series_dir("v1.0") / "series"
    series.write_text(series.read_text().replace("third/v1.0.patch\n", ""))
    (stack.project.overlay / "common/vllm/xpu/layer.py").unlink()
    stack.rederive()


CHANGES = {
    edit_kernel: "changed: third",
    edit_overlay: "changed: third",
    edit_message: "changed: second",
    add_step: "added: fourth",
    drop_step: "dropped: third",
}


@pytest.mark.parametrize("edit", CHANGES, ids=lambda edit: edit.__name__)
def test_each_change_of_the_content_fails_until_it_is_stamped(stamped: FakeStack, edit):
    assert problems(stamped) == []
    edit(stamped)
    [problem] = problems(stamped)
    assert "the series changed since revision 1 was recorded" in problem
    assert CHANGES[edit] in problem
    assert "next: xpustack stamp v1.0" in problem
    output = run(stamped, "stamp", "v1.0")
    assert f"v1.0: revision 2: {CHANGES[edit]}" in output
    assert problems(stamped) == []
    assert [release.revision for release in stamped.releases] == [2, 1]


def test_without_a_record_the_check_passes_and_says_so(stack: FakeStack):
    assert problems(stack) == []
    output = run(stack, "check", "--static")
    assert "note: v1.0: revision 1: no digest recorded" in output
    assert output.endswith("static: 0 errors\n")


def test_stamping_again_changes_nothing(stamped: FakeStack):
    before = stamped.contents()
    assert "v1.0: revision 1: unchanged" in run(stamped, "stamp", "--all")
    assert stamped.contents() == before


def test_keep_records_under_the_same_number(stamped: FakeStack):
    edit_overlay(stamped)
    run(stamped, "stamp", "v1.0", "--keep")
    assert problems(stamped) == []
    assert stamped.release.revision == 1
    again = stamped.contents()
    run(stamped, "stamp", "v1.0", "--keep")
    assert stamped.contents() == again


def test_a_record_that_is_not_committed_is_compared_with_the_last_commit(
    stamped: FakeStack,
):
    edit_message(stamped)
    run(stamped, "stamp", "v1.0")
    edit_kernel(stamped)
    [problem] = problems(stamped)
    assert "since revision 2 was recorded" in problem
    assert "changed: second, third" in problem


def test_without_history_a_change_is_found_and_not_named(stack: FakeStack):
    run(stack, "stamp", "--all")
    edit_kernel(stack)
    [problem] = problems(stack)
    assert "git's history does not say which steps" in problem
    assert "revision 2: git's history does not" in run(stack, "stamp", "v1.0")
    assert problems(stack) == []


def test_two_branches_that_stamp_conflict_in_one_place(stamped: FakeStack):
    root = stamped.project.root
    before = stamped.project.releases_file.read_text().splitlines()
    edit_kernel(stamped)
    run(stamped, "stamp", "--all")
    after = stamped.project.releases_file.read_text().splitlines()
    changed = [line for line in after if line not in before]
    assert [line.partition(" ")[0] for line in changed] == ["revision", "content"]
    assert git(root, "status", "--porcelain").split()[1::2] == [
        "kernels/xpu_dsv4/_launch.py",
        "releases.toml",
    ]


def test_the_order_of_the_steps_is_part_of_the_content(stamped: FakeStack):
    steps = load_series(stamped.project, "v1.0")
    digests = step_digests(stamped.project, steps)
    assert content(digests) == stamped.release.content
    turned = dict(reversed(digests.items()))
    assert content(turned) != stamped.release.content
    assert change(digests, turned).lines() == ["the order of the steps changed"]


def test_build_refuses_a_changed_series(stamped: FakeStack, tmp_path: Path):
    edit_kernel(stamped)
    stamped.rederive()
    with pytest.raises(SeriesError, match="changed since revision 1"):
        ship(stamped.project, stamped.cache, stamped.release, tmp_path)
    assert list(tmp_path.glob("*.whl")) == []


def test_a_damaged_record_is_an_error(stamped: FakeStack):
    pins = stamped.project.releases_file
    text = pins.read_text().replace(stamped.release.content, "0" * 63)
    pins.write_text(text)
    line = text.partition("content")[0].count("\n") + 1
    told = run(stamped, "stamp", "v1.0", code=3)
    assert "Expected" in told and f"correct line {line} of releases.toml" in told


def test_steps_that_edit_one_file_have_digests_of_their_own(stamped: FakeStack):
    steps = load_series(stamped.project, "v1.0")
    before = step_digests(stamped.project, steps)
    path = stamped.patch("first")
    text = path.read_text().replace("attention line 5 changed", "attention line 5 new")
    assert edited(ATTENTION, 5) and text != path.read_text()
    path.write_text(text)
    after = step_digests(stamped.project, load_series(stamped.project, "v1.0"))
    assert [slug for slug in after if after[slug] != before[slug]] == ["first"]
