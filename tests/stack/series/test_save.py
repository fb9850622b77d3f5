# SPDX-License-Identifier: Apache-2.0
"""Applying and saving: byte-identical, and no change of a series is lost."""

from pathlib import Path

import pytest
from fake_stack import ATTENTION, FakeStack, commit, edited, git, message

from stack.core.errors import ApplyError, SeriesError, UsageError


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def test_apply_then_save_changes_no_byte(stack: FakeStack) -> None:
    before = stack.contents()
    work = stack.apply()
    assert stack.save(work, dry_run=True) == []
    assert stack.save(work) == []
    assert stack.contents() == before
    assert stack.slugs() == ["first", "second", "third"]


def test_a_new_file_becomes_overlay_and_a_kernel_goes_home(stack: FakeStack) -> None:
    third = stack.patch("third").read_text()
    assert "Overlay: vllm/xpu/layer.py\nKernels: decode\n" in third
    assert "layer" not in third.partition("\n---\n")[2]
    assert (stack.project.overlay / "common/vllm/xpu/layer.py").is_file()
    work = stack.apply()
    kernel = "vllm/model_executor/kernels/xpu_dsv4/_launch.py"
    (work / kernel).write_text("OPTIONS = 2\n")
    git(work, "commit", "-qa", "--amend", "--no-edit")
    assert stack.save(work) == [
        "changed patches/v1.0/trees",
        "changed kernels/xpu_dsv4/_launch.py",
    ]
    launch = stack.project.kernels / "xpu_dsv4/_launch.py"
    assert launch.read_text() == "OPTIONS = 2\n"


def test_dry_run_lists_and_writes_nothing(stack: FakeStack) -> None:
    before = stack.contents()
    work = stack.apply()
    commit(work, "fourth", {"vllm/attention.py": ATTENTION, "vllm/xpu/more.py": "1\n"})
    assert stack.save(work, dry_run=True) == [
        "new patches/fourth/v1.0.patch",
        "changed patches/v1.0/series",
        "changed patches/v1.0/trees",
        "new vllm_overlay/common/vllm/xpu/more.py",
    ]
    assert stack.contents() == before


def test_a_changed_early_step_rederives_the_later_ones(stack: FakeStack) -> None:
    work = stack.apply(upto="first")
    text = ATTENTION.replace("attention line 1\n", "a\nb\n")
    (work / "vllm/attention.py").write_text(edited(text, 6))
    git(work, "commit", "-qa", "--amend", "--no-edit")
    assert stack.save(work) == [
        "changed patches/first/v1.0.patch",
        "changed patches/v1.0/trees",
    ]
    assert [tree.index for tree in stack.trees()] == [0, 1, 2, 3]
    assert stack.save(stack.apply("again")) == []


def test_a_later_step_that_cannot_follow_is_named(stack: FakeStack) -> None:
    before = stack.contents()
    work = stack.apply(upto="first")
    (work / "vllm/attention.py").write_text(edited(ATTENTION, 9, "otherwise"))
    git(work, "commit", "-qa", "--amend", "--no-edit")
    with pytest.raises(ApplyError) as caught:
        stack.save(work)
    assert (caught.value.release, caught.value.step) == ("v1.0", "second")
    assert stack.contents() == before


def test_an_overlay_file_that_another_release_shares_is_split(
    stack: FakeStack,
) -> None:
    shared = {"vllm/xpu/layer.py": "LAYER = 1\n"}
    stack.step("third", shared, "", "v2.0")
    work = stack.apply()
    (work / "vllm/xpu/layer.py").write_text("LAYER = 2\n")
    git(work, "commit", "-qa", "--amend", "--no-edit")
    assert stack.save(work) == [
        "changed patches/v1.0/trees",
        "new vllm_overlay/v1.0/vllm/xpu/layer.py",
    ]
    common = stack.project.overlay / "common/vllm/xpu/layer.py"
    assert common.read_text() == "LAYER = 1\n"
    assert stack.save(stack.apply("again")) == []


def test_a_dropped_step_takes_its_overlay_along(stack: FakeStack) -> None:
    work = stack.apply()
    git(work, "reset", "-q", "--hard", "HEAD~1")
    assert stack.save(work, drop=("third",)) == [
        "removed patches/third/v1.0.patch",
        "changed patches/v1.0/series",
        "changed patches/v1.0/trees",
        "removed vllm_overlay/common/vllm/xpu/layer.py",
    ]
    assert (stack.project.kernels / "xpu_dsv4/decode.py").is_file()


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("words", "problem", "way_out"),
    [
        (("checkout", "-q", "HEAD~2"), "not the end of the series", "checkout series"),
        (("checkout", "-qb", "mine"), "not the end of the series", "checkout series"),
        (("tag", "-f", "base", "HEAD"), "tag base does not name", "tag -f base "),
        (("tag", "-d", "base"), "tag base does not name", "tag -f base "),
        (("reset", "-q", "--hard", "HEAD~2"), "lost: second, third", "--drop second"),
    ],
    ids=["detached", "branch", "tag-moved", "tag-gone", "reset"],
)
def test_no_step_vanishes_by_oversight(
    stack: FakeStack,
    words: tuple[str, ...],
    problem: str,
    way_out: str,
    dry_run: bool,
) -> None:
    before = stack.contents()
    work = stack.apply()
    git(work, *words)
    with pytest.raises(UsageError, match=problem) as caught:
        stack.save(work, dry_run)
    assert stack.contents() == before
    hint = caught.value.hint or ""
    assert way_out in hint
    if "--drop" not in hint:
        command = hint.partition(";")[0].split(" ", 3)
        assert command[:3] == ["git", "-C", str(work)]
        git(work, *command[3].split())
        assert stack.save(work) == []
        assert stack.contents() == before


def test_the_last_step_of_a_part_of_the_series_does_not_vanish(
    stack: FakeStack,
) -> None:
    before = stack.contents()
    work = stack.apply(upto="second")
    git(work, "reset", "-q", "--hard", "HEAD~1")
    with pytest.raises(UsageError, match="lost: second\n"):
        stack.save(work)
    assert stack.contents() == before


def test_a_rename_drops_and_adds(stack: FakeStack) -> None:
    work = stack.apply()
    text = git(work, "log", "-1", "--format=%B").replace("Step: third", "Step: last")
    git(work, "commit", "-q", "--amend", "-F", "-", text=text)
    with pytest.raises(UsageError, match="lost: third"):
        stack.save(work)
    assert stack.save(work, drop=("third",)) == [
        "new patches/last/v1.0.patch",
        "removed patches/third/v1.0.patch",
        "changed patches/v1.0/series",
        "changed patches/v1.0/trees",
    ]
    assert stack.slugs() == ["first", "second", "last"]


def test_a_step_that_stays_cannot_be_dropped(stack: FakeStack) -> None:
    work = stack.apply()
    with pytest.raises(UsageError, match="its commit is still there"):
        stack.save(work, drop=("third",))
    git(work, "reset", "-q", "--hard", "HEAD~1")
    with pytest.raises(UsageError, match="did you mean third"):
        stack.save(work, drop=("thirds",))


def test_other_files_of_the_series_folder_stay(stack: FakeStack) -> None:
    draft = stack.write("patches/first/draft.patch", "not yet in the series\n")
    work = stack.apply()
    commit(work, "fourth", {"vllm/attention.py": edited(ATTENTION, 30)})
    assert stack.save(work)[0] == "new patches/fourth/v1.0.patch"
    assert draft.read_text() == "not yet in the series\n"


def test_an_error_names_no_file_that_is_gone(stack: FakeStack) -> None:
    """A save works in a copy of the project first, which it removes."""
    work = stack.apply()
    text = git(work, "log", "-1", "--format=%B").replace(
        "Kernels: decode", "Kernels: x"
    )
    git(work, "commit", "-q", "--amend", "-F", "-", text=text)
    with pytest.raises(SeriesError, match="no kernel module x") as caught:
        stack.save(work)
    assert caught.value.path == str(stack.patch("third"))
    home = stack.project.kernels / "xpu_dsv4"
    assert caught.value.hint == f"create {home / 'x.py'}"


def test_what_is_not_committed_is_not_lost(stack: FakeStack) -> None:
    work = stack.apply()
    (work / "vllm/new.py").write_text("1\n")
    with pytest.raises(UsageError, match="not committed") as caught:
        stack.save(work)
    assert "?? vllm/new.py" in caught.value.detail


@pytest.mark.parametrize(
    ("edits", "trailers", "problem"),
    [
        ({"PKG-INFO": "Version: 2\n"}, "", "PKG-INFO: the file is generated"),
        (
            {"vllm/model_executor/kernels/xpu_dsv4/decode.py": "x = 1\n"},
            "",
            "is a kernel: change it",
        ),
        (
            {"vllm/model_executor/kernels/xpu_dsv4/kv/gather.py": "x = 1\n"},
            "",
            "would not give the commit's tree",
        ),
        (
            {"vllm/rope.py": "x\n"},
            "Kernels: kv/gather\n",
            "would not give the commit's tree",
        ),
        ({"vllm/rope.py": "x\n"}, "Upstream-Status: Maybe\n", "is there twice"),
    ],
    ids=[
        "generated",
        "kernel-patched",
        "kernel-unnamed",
        "kernel-missing",
        "trailer-twice",
    ],
)
def test_a_commit_that_cannot_be_a_step_is_refused(
    stack: FakeStack, edits: dict[str, str], trailers: str, problem: str
) -> None:
    before = stack.contents()
    work = stack.apply()
    commit(work, "fourth", edits, trailers)
    with pytest.raises(SeriesError, match=problem) as caught:
        stack.save(work)
    assert caught.value.release == "v1.0"
    assert stack.contents() == before


def test_a_commit_without_a_slug_is_refused(stack: FakeStack) -> None:
    work = stack.apply()
    git(work, "commit", "-q", "--allow-empty", "-m", "Do something")
    with pytest.raises(SeriesError, match="Step: swa-rope"):
        stack.save(work)


@pytest.mark.parametrize(
    ("slug", "right"),
    [
        ("My Step", "my-step"),
        ("my step", "my-step"),
        ("my_step", "my-step"),
        ("../x", "x"),
        ("Ä", "swa-rope"),
    ],
)
def test_a_slug_of_another_form_is_said_to_be_none(
    stack: FakeStack, slug: str, right: str
) -> None:
    before = stack.contents()
    work = stack.apply()
    commit(work, slug, {"vllm/windows.py": "other\n"})
    with pytest.raises(SeriesError) as caught:
        stack.save(work)
    assert caught.value.message.startswith(f"{slug!r} is no slug")
    assert f"write `Step: {right}`" in caught.value.message
    assert stack.contents() == before


def test_an_edit_of_a_file_with_carriage_returns_is_saved(stack: FakeStack) -> None:
    work = stack.apply()
    commit(work, "fourth", {"vllm/windows.py": "one\r\nthree\r\n"})
    stack.save(work)
    assert b"\n-two\r\n+three\r\n" in stack.patch("fourth").read_bytes()
    again = stack.apply("again")
    assert (again / "vllm/windows.py").read_bytes() == b"one\r\nthree\r\n"
    assert stack.save(again) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("---", "a line `---` ends a message in a mail"),
        ("From: Me <me@localhost>", "message cannot have the line 'From: Me"),
        ("So:\n\ndiff --git a/x b/x", "message cannot have the line 'diff --git"),
        ("An answer.\r", "carriage return"),
    ],
    ids=["dashes", "header", "diff", "carriage-return"],
)
def test_a_message_that_no_mail_can_hold_is_changed_in_its_commit(
    stack: FakeStack, line: str, problem: str
) -> None:
    before = stack.contents()
    work = stack.apply()
    (work / "vllm/rope.py").write_text("x\n")
    text = message("fourth").replace("Why fourth.", line)
    arguments = ("-qa", "--cleanup=verbatim", "-F", "-")
    git(work, "commit", *arguments, text=text)
    with pytest.raises(SeriesError, match=problem) as caught:
        stack.save(work)
    hint = caught.value.hint or ""
    assert hint == f"git -C {work} rebase -i base"
    assert stack.contents() == before


def test_a_comment_of_the_order_stays_with_its_line(stack: FakeStack) -> None:
    order = stack.project.series_dir("v1.0") / "series"
    first, second, third = order.read_text().splitlines(keepends=True)
    text = f"# guards\n{first}\n# moves\n# later\n{second}{third}# the end\n"
    order.write_text(text)
    assert stack.slugs() == ["first", "second", "third"]
    work = stack.apply()
    assert stack.save(work) == []
    commit(work, "fourth", {"vllm/attention.py": edited(ATTENTION, 30)})
    git(work, "rebase", "-q", "--onto", "HEAD~3", "HEAD~2")
    stack.save(work, drop=("second",))
    lines = order.read_text().splitlines()
    assert lines[:2] == text.splitlines()[:2] and lines[-1] == "# the end"
    assert "# moves" not in lines and len(lines) == 5


def test_a_directory_of_someone_else_is_refused(
    stack: FakeStack, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="not made by xpustack apply"):
        stack.save(tmp_path)
