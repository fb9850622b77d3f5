# SPDX-License-Identifier: Apache-2.0
"""The static check reports every fault with its place, and none in a good series."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_stack import ATTENTION, FakeStack, edited

from stack.series.static import Advice, check_static


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def replaced(slug: str, old: str, new: str) -> Callable[[FakeStack], None]:
    def change(stack: FakeStack) -> None:
        path = stack.patch(slug)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new), newline="")

    return change


def written(path: str, text: str) -> Callable[[FakeStack], None]:
    return lambda stack: stack.write(path, text) and None


def removed(path: str) -> Callable[[FakeStack], None]:
    return lambda stack: (stack.project.root / path).unlink()


ORDER = "patches/v1.0/series"
FAULTS = {
    "patch-unlisted": (
        written(ORDER, "first/v1.0.patch\nsecond/v1.0.patch\n"),
        "no series names the patch",
    ),
    "patch-of-the-layout-before": (
        written("patches/v1.0/first.patch", ""),
        "a patch lies in the folder of its step",
    ),
    "record-missing": (
        removed("patches/v1.0/trees"),
        "the recorded trees are not those of the series",
    ),
    "record-malformed": (
        written("patches/v1.0/trees", "first\n"),
        "is not one step and the id of its tree",
    ),
    "patch-missing": (removed("patches/third/v1.0.patch"), "does not exist"),
    "listed-twice": (
        written(ORDER, "first/v1.0.patch\nfirst/v2.0.patch\n"),
        "the step first is listed twice",
    ),
    "bad-name": (written(ORDER, "0001-First.patch\n"), "not a patch name"),
    "base-name": (written(ORDER, "base/v1.0.patch\n"), "the tree without steps"),
    "wrong-order": (
        written(ORDER, "first/v1.0.patch\nthird/v1.0.patch\nsecond/v1.0.patch\n"),
        "the recorded trees are not those of the series",
    ),
    "comment-in-message": (
        replaced("first", "Why first.\n", "Why first:\n#7 calls it.\n"),
        "the line '#7 calls it.', which git takes for a comment",
    ),
    "no-status": (
        replaced("first", "Upstream-Status: Pending\n", ""),
        "Status is missing",
    ),
    "bad-status": (replaced("first", ": Pending", ": Soon"), "is none of: Pending"),
    "status-without-number": (
        replaced("first", ": Pending", ": Backport [vllm#1]"),
        "is none of: Pending",
    ),
    "related-without-number": (
        replaced("first", "Removal:", "Related: vllm#1\nRemoval:"),
        "Related 'vllm#1' is not vllm-project/vllm#N",
    ),
    "related-twice": (
        replaced(
            "first", "Removal:", "Related: vllm-project/vllm#1\n" * 2 + "Removal:"
        ),
        "names vllm-project/vllm#1 twice",
    ),
    "no-removal": (
        replaced("first", "Removal: when upstream has it\n", ""),
        "Removal is missing",
    ),
    "no-test": (
        replaced("first", "Test: tests/steps/test_any.py\n", ""),
        "Test is missing",
    ),
    "no-fails-before": (
        replaced("first", "Fails-before: assert .*\n", ""),
        "Fails-before is missing",
    ),
    "no-such-test": (replaced("first", "test_any", "test_none"), "there is no tests/"),
    "bad-pattern": (replaced("first", "assert .*", "assert ("), "not a regular expr"),
    "none-with-diff": (
        replaced("first", "assert .*", "none [nothing calls it]"),
        "only in a step that has no diff",
    ),
    "outside": (
        replaced("first", "vllm/attention.py", "../attention.py"),
        "leaves the tree",
    ),
    "absolute": (
        replaced("first", "/vllm/attention.py", "//etc/attention.py"),
        "leaves the tree",
    ),
    "generated": (
        replaced("first", "vllm/attention.py", "vllm.egg-info/SOURCES.txt"),
        "generated when an sdist",
    ),
    "blob-ids": (
        replaced("first", "--- a/", "index 1234567..89abcde 100644\n--- a/"),
        "lines of blob ids",
    ),
    "hunk-count": (replaced("first", "+2,7 @@", "+2,8 @@"), "does not count its lines"),
    "hunk-place": (replaced("first", "+2,7 @@", "+3,7 @@"), "does not follow"),
    "carriage-returns": (
        replaced("first", "Why first.\n", "Why first.\r\n"),
        "LF alone",
    ),
    "overlay-missing": (
        removed("vllm_overlay/common/vllm/xpu/layer.py"),
        "the overlay has no vllm/xpu/layer.py",
    ),
    "overlay-unused": (
        written("vllm_overlay/common/vllm/xpu/unused.py", ""),
        "no step brings",
    ),
    "overlay-outside": (
        replaced("third", "Overlay: vllm/xpu/layer.py", "Overlay: ../layer.py"),
        "leaves the tree",
    ),
    "kernel-missing": (
        replaced("third", "Kernels: decode", "Kernels: encode"),
        "no kernel module encode",
    ),
    "stray-series": (written("patches/v9.0/series", ""), "no pinned release"),
    "bad-pins": (written("releases.toml", "release = 1\n"), "Expected"),
}


def test_good_series_have_no_findings(stack: FakeStack) -> None:
    assert check_static(stack.project) == []


@pytest.mark.parametrize(("change", "problem"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(
    stack: FakeStack, change: Callable[[FakeStack], None], problem: str
) -> None:
    change(stack)
    problems = check_static(stack.project)
    matches = [fault for fault in problems if problem in fault.message]
    assert matches, [str(fault) for fault in problems]
    assert matches[0].path and matches[0].hint
    assert not isinstance(matches[0], Advice)


def test_two_owners_are_found(stack: FakeStack) -> None:
    first = stack.patch("first")
    first.write_text(
        first.read_text().replace(
            "Test:", "Overlay: vllm/xpu/layer.py\nKernels: decode\nTest:"
        )
    )
    messages = [problem.message for problem in check_static(stack.project)]
    assert "the kernel decode already belongs to first" in messages
    assert "the overlay file vllm/xpu/layer.py already belongs to first" in messages


def test_all_faults_of_all_releases_are_listed(stack: FakeStack) -> None:
    stack.step("first", {"vllm/attention.py": edited(ATTENTION, 2)}, "", "v2.0")
    assert stack.patch("first") != stack.patch("first", "v2.0")
    replaced("first", ": Pending", ": Soon")(stack)
    replaced("second", ": Pending", ": Later")(stack)
    path = stack.patch("first", "v2.0")
    path.write_text(path.read_text().replace("Removal: when upstream has it\n", ""))
    problems = check_static(stack.project)
    assert [(problem.release, problem.step) for problem in problems] == [
        ("v1.0", "first"),
        ("v1.0", "second"),
        ("v2.0", "first"),
    ]


def test_a_patch_that_only_a_comment_names_is_not_in_the_series(
    stack: FakeStack,
) -> None:
    stack.write(ORDER, "first/v1.0.patch\nsecond/v1.0.patch\n# third/v1.0.patch\n")
    problems = check_static(stack.project)
    assert any("no series names the patch" in problem.message for problem in problems)


def test_a_large_step_is_a_warning_with_its_figure(stack: FakeStack) -> None:
    stack.step("large", {"vllm/xpu/large.py": "x = 1\n" * 501})
    stack.step("tests", {"tests/xpu/test_large.py": "x = 1\n" * 501})
    (problem,) = check_static(stack.project)
    assert isinstance(problem, Advice) and problem.step == "large"
    assert problem.message.startswith("501 changed lines")
