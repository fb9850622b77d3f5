# SPDX-License-Identifier: Apache-2.0
"""A series carried to another release: every outcome, and nothing half-done."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import invoke
from fake_stack import ATTENTION, BASE, FakeStack, edited, git
from sdists import XPU_TXT, write_sdist

from stack.base.releases import load
from stack.core.errors import EnvironmentProblem, SourceError, UsageError
from stack.refresh import report as refresh_report
from stack.refresh.carry import Clash
from stack.refresh.refresh import RefreshReport, refresh
from stack.series.patch import load_series

FIRST = edited(ATTENTION, 5)


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def carry_over(stack: FakeStack, name: str = "v3.0", **options) -> RefreshReport:
    return refresh(stack.project, stack.cache, name, "v1.0", **options)


def outcomes(done: RefreshReport) -> dict[str, str]:
    return {step.step: step.outcome for step in done.steps}


def texts(stack: FakeStack, release: str) -> list[tuple[str, str]]:
    return [(step.slug, step.text) for step in load_series(stack.project, release)]


def test_a_clean_series_keeps_names_and_text(stack: FakeStack) -> None:
    before = stack.contents()
    done = carry_over(stack, "v2.0")
    assert outcomes(done) == dict.fromkeys(("first", "second", "third"), "clean")
    assert done.stale is None and stack.contents() == before
    done = carry_over(stack, "v2.0", write=True)
    assert [f"{file.kind} {file.path}" for file in done.stale or ()] == [
        "new patches/v2.0/series",
        "new patches/v2.0/trees",
    ]
    assert texts(stack, "v2.0") == texts(stack, "v1.0")
    for slug in stack.slugs():
        assert stack.patch(slug, "v2.0") == stack.patch(slug)
    assert len(stack.trees("v2.0")) == 4


def test_changed_context_is_merged(stack: FakeStack) -> None:
    # Lines 3 and 11 are context of the first two steps' hunks, not their change.
    text = edited(edited(ATTENTION, 3, "upstream"), 10, "upstream")
    stack.publish("3.0", {"vllm/attention.py": "new\n" + text})
    done = carry_over(stack, write=True)
    assert list(outcomes(done).values()) == ["merged", "merged", "clean"]
    assert done.steps[0].files[0].upstream_lines == 5
    both = edited(edited(text, 5), 7)
    work = stack.apply("there", "v3.0")
    assert (work / "vllm/attention.py").read_text() == "new\n" + both


def test_a_planted_conflict_shows_both_sides_and_the_cause(stack: FakeStack) -> None:
    theirs = edited(ATTENTION, 7, "upstream's way")
    stack.publish("3.0", {"vllm/attention.py": theirs})
    before = stack.contents()
    done = carry_over(stack, write=True)
    assert list(outcomes(done).values()) == ["merged", "conflict", "clean"]
    assert [step.tentative for step in done.steps] == [False, False, True]
    assert done.steps[1].clashes == (
        Clash(
            "vllm/attention.py",
            "content",
            "@@ -7 +7 @@ attention line 6",
            ("-attention line 7", "+attention line 7 changed"),
            "@@ -7 +7 @@ attention line 6",
            ("-attention line 7", "+attention line 7 upstream's way"),
        ),
    )
    assert done.stale is None and stack.contents() == before
    page = refresh_report.markdown(done)
    assert "+attention line 7 upstream's way" in page
    assert "| `third` | clean (tentative) |" in page


def test_a_step_on_top_of_a_conflict_waits(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/attention.py": edited(ATTENTION, 5, "otherwise")})
    assert outcomes(carry_over(stack)) == {
        "first": "conflict",
        "second": "waits",
        "third": "clean",
    }


def test_a_conflict_is_resolved_by_hand_and_the_run_goes_on(stack: FakeStack) -> None:
    theirs = edited(ATTENTION, 7, "upstream's way")
    stack.publish("3.0", {"vllm/attention.py": theirs})
    work = stack.root / "carry"
    first = carry_over(stack, directory=work, write=True)
    assert [step.step for step in first.open] == ["second"]
    assert "<<<<<<<" in (work / "vllm/attention.py").read_text()
    with pytest.raises(UsageError, match="resolve them first") as caught:
        carry_over(stack, directory=work)
    assert any("CHERRY_PICK_HEAD" in line for line in caught.value.detail)
    solved = edited(edited(theirs, 5), 7)
    (work / "vllm/attention.py").write_text(solved)
    git(work, "add", "vllm/attention.py")
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    done = carry_over(stack, directory=work, write=True)
    assert list(outcomes(done).values()) == ["merged", "resolved", "clean"]
    assert done.steps[1].clashes == first.steps[1].clashes
    assert texts(stack, "v3.0") == texts(stack, "v1.0")
    assert len(stack.trees("v3.0")) == 4
    assert outcomes(carry_over(stack, directory=work)) == outcomes(done)


def solve_on_3(stack: FakeStack) -> str:
    """Carry to v3.0, whose line 7 collides, by hand; its attention with the steps."""
    theirs = edited(ATTENTION, 7, "upstream's way")
    stack.publish("3.0", {"vllm/attention.py": theirs})
    work = stack.root / "carry"
    carry_over(stack, directory=work, write=True)
    solved = edited(edited(theirs, 5), 7, "both ways")
    (work / "vllm/attention.py").write_text(solved)
    git(work, "add", "vllm/attention.py")
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    assert not carry_over(stack, directory=work, write=True).open
    return solved


def test_another_form_of_the_step_settles_a_conflict(stack: FakeStack) -> None:
    solved = solve_on_3(stack)
    theirs = edited(edited(ATTENTION, 7, "upstream's way"), 1, "newer")
    stack.publish("4.0", {"vllm/attention.py": theirs})
    done = carry_over(stack, "v4.0", write=True)
    assert list(outcomes(done).values()) == ["merged", "variant", "clean"]
    assert done.steps[1].text == "the patch of v3.0 fits as it is"
    assert stack.patch("second", "v4.0") == stack.patch("second", "v3.0")
    work = stack.apply("there", "v4.0")
    assert (work / "vllm/attention.py").read_text() == edited(solved, 1, "newer")


def test_no_form_of_the_step_fits_another_conflict(stack: FakeStack) -> None:
    solve_on_3(stack)
    theirs = edited(ATTENTION, 7, "a third way")
    stack.publish("4.0", {"vllm/attention.py": theirs})
    work = stack.root / "next"
    done = carry_over(stack, "v4.0", directory=work)
    assert outcomes(done)["second"] == "conflict"
    assert "<<<<<<<" in (work / "vllm/attention.py").read_text()


def test_a_conflict_that_was_committed_as_it_was_is_refused(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/attention.py": edited(ATTENTION, 5, "otherwise")})
    work = stack.root / "carry"
    carry_over(stack, directory=work)
    git(work, "add", "vllm/attention.py")
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    with pytest.raises(UsageError, match="conflict markers") as caught:
        carry_over(stack, directory=work)
    assert caught.value.detail[0] == "vllm/attention.py:5"


def test_kernels_that_changed_meanwhile_are_not_set_back(stack: FakeStack) -> None:
    work = stack.root / "carry"
    carry_over(stack, "v2.0", directory=work)
    stack.write("kernels/xpu_dsv4/_launch.py", "OPTIONS = 2\n")
    stack.rederive()
    before = stack.contents()
    with pytest.raises(UsageError, match="changed since") as caught:
        carry_over(stack, "v2.0", directory=work, write=True)
    assert caught.value.detail == (
        "patches/v1.0/trees",
        "kernels/xpu_dsv4/_launch.py",
    )
    assert stack.contents() == before


def test_a_person_may_drop_a_conflicting_step(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/attention.py": edited(ATTENTION, 5, "otherwise")})
    work = stack.root / "carry"
    carry_over(stack, directory=work)
    git(work, "cherry-pick", "--abort")
    done = carry_over(stack, directory=work, drop=("first",))
    assert list(outcomes(done).values()) == ["dropped", "merged", "clean"]
    again = carry_over(stack, directory=work, write=True)
    assert again.steps[0].outcome == "dropped", "it is remembered"
    assert again.steps[0].text == "as asked before"
    assert stack.slugs("v3.0") == ["second", "third"]


KERNELS = "vllm/model_executor/kernels/xpu_dsv4"


def add_gather(stack: FakeStack) -> None:
    """A step whose kernel imports one that `third` brings."""
    folder = stack.project.kernels / "xpu_dsv4/kv"
    package, gather = folder / "__init__.py", folder / "gather.py"
    stack.step(
        "fourth",
        {
            "vllm/attention.py": edited(edited(edited(ATTENTION, 5), 7), 30),
            f"{KERNELS}/kv/__init__.py": package.read_text(),
            f"{KERNELS}/kv/gather.py": gather.read_text(),
        },
        "Kernels: kv/gather\n",
    )


def test_a_step_brings_the_kernels_of_a_dropped_one(stack: FakeStack) -> None:
    add_gather(stack)
    done = carry_over(stack, "v2.0", drop=("third",), write=True)
    assert outcomes(done)["fourth"] == "clean"
    work = stack.apply("there", "v2.0")
    names = {path.name for path in (work / KERNELS).iterdir()}
    assert names == {"__init__.py", "_launch.py", "_triton.py", "kv"}


def test_a_conflict_is_left_with_the_kernels_of_a_dropped_step(
    stack: FakeStack,
) -> None:
    add_gather(stack)
    stack.publish("3.0", {"vllm/attention.py": edited(ATTENTION, 30, "otherwise")})
    work = stack.root / "carry"
    done = carry_over(stack, directory=work, drop=("third",))
    assert [step.step for step in done.open] == ["fourth"]
    solved = edited(edited(edited(ATTENTION, 5), 7), 30, "both")
    (work / "vllm/attention.py").write_text(solved)
    git(work, "add", "vllm/attention.py")
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    done = carry_over(stack, directory=work, drop=("third",), write=True)
    assert outcomes(done)["fourth"] == "resolved"
    assert (stack.apply("there", "v3.0") / KERNELS / "_launch.py").is_file()


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        (FIRST, "nothing is left"),
        (edited(FIRST, 4, "upstream"), "nothing is left|applies in reverse|patch id"),
        (
            FIRST.replace("line 5 changed\n", "line 5  changed\n"),
            "patch id",
        ),
    ],
    ids=["same", "same-and-more", "same-but-blanks"],
)
def test_a_planted_upstreamed_step_is_found(
    stack: FakeStack, text: str, evidence: str
) -> None:
    stack.publish("3.0", {"vllm/attention.py": text})
    done = carry_over(stack, write=True)
    assert outcomes(done)["first"] == "upstream", done.steps[0]
    assert any(part in done.steps[0].text for part in evidence.split("|"))
    assert stack.slugs("v3.0") == ["second", "third"]


def test_a_file_that_upstream_has_now_is_a_conflict(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/xpu/layer.py": "LAYER = 3\n"})
    done = carry_over(stack)
    assert outcomes(done)["third"] == "conflict"
    (clash,) = done.steps[2].clashes
    assert (clash.path, clash.kind) == ("vllm/xpu/layer.py", "add/add")
    assert (clash.ours, clash.theirs) == (("+LAYER = 1",), ("+LAYER = 3",))


def test_a_file_that_is_gone_is_a_conflict(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/rope.py": ""})
    done = carry_over(stack)
    assert outcomes(done)["third"] == "conflict"


def test_a_file_of_an_earlier_step_is_not_said_to_be_gone(stack: FakeStack) -> None:
    stack.step("fourth", {"vllm/xpu/layer.py": "LAYER = 2\n"})
    stack.publish("3.0", {"vllm/windows.py": "one\r\n"})
    done = carry_over(stack)
    assert outcomes(done)["fourth"] == "clean"
    assert done.steps[3].files == ()
    assert "the file is gone" not in refresh_report.markdown(done)


def test_an_unpinned_release_is_pinned_only_when_written(
    links: Path, stack: FakeStack
) -> None:
    files = {name: text.encode() for name, text in BASE.items()}
    files[XPU_TXT] = b"torch==2.12.0\ntriton==3.7.1\nvllm_xpu_kernels==0.1.10\n"
    write_sdist(links / "vllm-3.0.tar.gz", files)
    with pytest.raises(UsageError, match="not a pinned release"):
        carry_over(stack)
    before = stack.contents()
    online = replace(stack.cache, offline=False)
    done = refresh(stack.project, online, "v3.0", "v1.0")
    assert done.release.xpu_kernels.version == "0.1.10"
    assert stack.contents() == before
    carry_over(stack, write=True)
    assert load(stack.project).names == ("v1.0", "v2.0", "v3.0")
    assert stack.slugs("v3.0") == stack.slugs("v1.0")


def test_steps_that_the_release_has_stay(stack: FakeStack) -> None:
    stack.step("first", {"vllm/attention.py": edited(ATTENTION, 5, "own")}, "", "v2.0")
    own = stack.patch("first", "v2.0").read_bytes()
    done = carry_over(stack, "v2.0", write=True)
    assert list(outcomes(done).values()) == ["present", "merged", "clean"]
    assert stack.patch("first", "v2.0").read_bytes() == own
    assert stack.slugs("v2.0") == ["first", "second", "third"]


def test_wrong_words_and_foreign_directories(stack: FakeStack) -> None:
    with pytest.raises(UsageError, match="did you mean"):
        carry_over(stack, "v2.1")
    with pytest.raises(UsageError, match="comes from"):
        carry_over(stack, "v1.0")
    with pytest.raises(UsageError, match="did you mean second"):
        carry_over(stack, "v2.0", drop=("secnd",))
    foreign = stack.root / "foreign"
    foreign.mkdir()
    (foreign / "mine").touch()
    with pytest.raises(UsageError, match="not made by xpustack refresh"):
        carry_over(stack, "v2.0", directory=foreign)
    assert [path.name for path in foreign.iterdir()] == ["mine"]
    with pytest.raises(UsageError, match="not made by xpustack refresh"):
        carry_over(stack, "v2.0", directory=stack.apply())
    work = stack.root / "carry"
    carry_over(stack, "v2.0", directory=work)
    stack.publish("3.0", {})
    with pytest.raises(UsageError, match="belongs to another refresh"):
        carry_over(stack, "v3.0", directory=work)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left")])
def test_a_run_that_ends_early_leaves_the_project_alone(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    stack.publish("3.0", {})
    before = stack.contents()

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("stack.refresh.refresh.save", fail)
    with pytest.raises((KeyboardInterrupt, EnvironmentProblem, OSError)):
        carry_over(stack, write=True)
    assert stack.contents() == before
    monkeypatch.undo()
    assert outcomes(carry_over(stack, write=True))["third"] == "clean"


def test_an_interrupt_in_the_middle_is_taken_up_again(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = stack.root / "carry"

    def interrupt(message: str) -> None:
        if "second" in message:
            raise KeyboardInterrupt

    stack.cache = replace(stack.cache, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        carry_over(stack, "v2.0", directory=work)
    messages: list[str] = []
    stack.cache = replace(stack.cache, progress=messages.append)
    done = carry_over(stack, "v2.0", directory=work)
    assert outcomes(done) == dict.fromkeys(("first", "second", "third"), "clean")
    assert not any("first" in line for line in messages)


@pytest.mark.parametrize("spare", [0, 64])
def test_a_full_disk_is_named(stack: FakeStack, small_disk: Path, spare: int) -> None:
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(free - (spare << 10)))
    work = small_disk / "carry"
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        carry_over(stack, "v2.0", directory=work)
    assert not work.exists()
    filler.unlink()
    assert outcomes(carry_over(stack, "v2.0", directory=work))["third"] == "clean"


def test_the_command(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    stack.publish("3.0", {"vllm/attention.py": edited(ATTENTION, 7, "otherwise")})
    page = stack.root / "page.md"
    words = ["refresh", "v3.0", "--from", "v1.0", "--offline"]
    done = invoke(*words, "--report", str(page))
    assert done.exit_code == 4, done.output
    assert "+attention line 7 otherwise" in done.output
    assert "v1.0 to v3.0: 1 merged, 1 conflict, 1 clean" in done.output
    assert page.read_text().startswith("# v1.0 to v3.0\n")
    done = invoke("refresh", "v2.0", "--from", "v1.0", "--json")
    assert done.exit_code == 0 and '"open": 0' in done.stdout, done.output


def test_the_release_that_leaves_the_window_is_named(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    pins = stack.project.releases_file
    for window, offers in ((2, False), (1, True)):
        entries = pins.read_text().partition("[[release]]")[2]
        pins.write_text(f"window = {window}\n\n[[release]]{entries}")
        done = invoke("refresh", "v2.0", "--from", "v1.0", "--offline", "--write")
        assert done.exit_code == 0, done.output
        assert ("xpustack retire v1.0, which is older" in done.output) == offers


def test_a_finished_release_has_no_conflict(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever recorded its series had decided on the steps that it lacks."""
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    stack.publish("3.0", {"vllm/attention.py": edited(ATTENTION, 7, "otherwise")})
    words = ("refresh", "v3.0", "--from", "v1.0", "--offline")
    done = invoke(*words, "--drop", "second", "--write")
    assert done.exit_code == 0, done.output
    assert invoke(*words).exit_code == 4
    assert invoke("stamp", "v3.0").exit_code == 0
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "v1.0 to v3.0: 2 present, 1 left" in done.stdout
    assert "v3.0's series is recorded without it" in done.stdout
    assert "next: nothing, or --to DIR" in done.stdout
    work = stack.root / "work"
    assert invoke(*words, "--to", work).exit_code == 4
    assert "<<<<<<<" in (work / "vllm/attention.py").read_text()


def test_a_finished_release_still_gets_a_new_step(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    carry_over(stack, "v2.0", write=True)
    assert invoke("stamp", "v2.0").exit_code == 0
    stack.step("fourth", {"vllm/other.py": "changed\n"}, "", "v1.0")
    assert outcomes(carry_over(stack, "v2.0"))["fourth"] == "clean"


@pytest.mark.parametrize("asked", ["v1", "1.0.0", "2"])
def test_another_writing_of_a_pinned_version_is_no_release(
    stack: FakeStack, asked: str
) -> None:
    """Whether or not the index may be asked."""
    for offline in (True, False):
        cache = replace(stack.cache, offline=offline)
        with pytest.raises(UsageError, match="is not a pinned release"):
            refresh(stack.project, cache, asked, "v1.0")


def test_an_archive_that_changed_is_refused(stack: FakeStack) -> None:
    stack.publish("3.0", {})
    release = stack.releases["v3.0"]
    (stack.cache.sdists / release.sha256 / release.sdist).write_bytes(b"x")
    with pytest.raises(SourceError, match="changed"):
        carry_over(stack)


def test_a_step_that_was_written_and_is_dropped_later_goes(stack: FakeStack) -> None:
    work = stack.root / "work"
    carry_over(stack, "v2.0", directory=work, write=True)
    git(work, "reset", "-q", "--hard", "HEAD~1")
    done = carry_over(stack, "v2.0", directory=work, drop=("third",), write=True)
    assert outcomes(done)["third"] == "dropped"
    assert stack.slugs("v2.0") == ["first", "second"]
    assert not stack.patch("third", "v2.0").exists()
