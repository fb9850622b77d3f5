# SPDX-License-Identifier: Apache-2.0
"""Patch files: the reader accepts only what the writer writes."""

import subprocess
from pathlib import Path

import pytest
from fake_stack import FakeStack
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.base import releases
from stack.core.errors import SeriesError
from stack.core.project import Project
from stack.series.patch import format_patch, load_series, read_patch, split_text
from stack.series.tree import Step, Trailers


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def test_the_mail_of_a_step(stack: FakeStack) -> None:
    mail = stack.patch("first").read_text()
    head, _, diff = mail.partition("\n---\n")
    assert head == (
        "Subject: [PATCH] [XPU][DSv4] Do first\n\nWhy first.\n\n"
        "Upstream-Status: Pending\nRemoval: when upstream has it\n"
        "Test: tests/steps/test_any.py\nFails-before: assert .*"
    )
    assert diff.startswith("diff --git a/vllm/attention.py b/vllm/attention.py\n--- ")
    assert mail.endswith("\n") and "\n-- \n" not in mail


def test_git_reads_the_same_from_every_mail(
    real_project: Project, tmp_path: Path
) -> None:
    steps = {
        step.path: step
        for release in releases.load(real_project)
        for step in load_series(real_project, release.name)
    }
    assert len(steps) > 100
    for step in steps.values():
        header = subprocess.run(
            ["git", "mailinfo", "-b", "message", "patch"],
            cwd=tmp_path,
            input=step.path.read_bytes(),
            capture_output=True,
            check=True,
        ).stdout.decode()
        assert f"Subject: {step.subject}\n" in header, step.path
        text = (tmp_path / "message").read_text()
        assert f"{step.subject}\n\n{text}" == step.text
        assert (tmp_path / "patch").read_bytes() == b"---\n" + step.diff


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    subject=st.from_regex(
        r"\[XPU\]\[DSv4\] [A-Z][a-zäß]{1,20}( [a-zäß]{1,20}){0,6}", fullmatch=True
    ),
    message=st.lists(
        st.from_regex(r"[A-Z][a-z ,é]{0,60}\.", fullmatch=True), max_size=3
    ),
    overlay=st.lists(st.from_regex(r"vllm/[a-z]{1,9}\.py", fullmatch=True), max_size=2),
    related=st.lists(
        st.from_regex(r"vllm-project/[a-z-]{1,9}#[1-9][0-9]{0,4}", fullmatch=True),
        max_size=2,
    ),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    subject: str,
    message: list[str],
    overlay: list[str],
    related: list[str],
) -> None:
    path = tmp_path_factory.getbasetemp() / "patches/any-step/v1.0.patch"
    path.parent.mkdir(parents=True, exist_ok=True)
    trailers = Trailers(
        upstream_status="Inappropriate [ours alone]",
        related=tuple(related),
        removal="never",
        overlay=tuple(overlay),
        kernels=("decode",),
        test="tests/steps/test_any.py",
        fails_before="none [nothing calls it yet]",
    )
    step = Step(
        "v1.0", "any-step", path, subject, "\n\n".join(message), trailers, b"", ()
    )
    path.write_bytes(format_patch(step))
    assert read_patch("v1.0", path) == step
    assert step.trailers.failure is None


def test_a_subject_is_what_git_reads_from_the_mail() -> None:
    subject, message, _ = split_text("[XPU] Keep  the\tsink \n\nIt counts.\n")
    assert (subject, message) == ("[XPU] Keep the sink", "It counts.")


@pytest.mark.parametrize(
    ("old", "new", "problem", "line"),
    [
        ("\n---\n", "\n", "line `---`", None),
        ("Subject:", "From: a <a@b>\nSubject:", "cannot have the line", None),
        ("[PATCH] ", "", "not as xpustack writes it", None),
        ("Test: ", "Signed-off-by: me\nTest: ", "not a trailer of a step", 9),
        ("\n---\n", "\n---\n file | 2 +-\n", "does not follow the line `---`", 10),
        ("diff --git a/vllm", "diff --git a/xllm", "expected a line `diff", 10),
        ("--- a", "rename from x\n--- a", "renames and copies", 10),
        ("@@ -2", "@@ 2", "malformed|expected a line `diff|no hunk", None),
    ],
)
def test_a_malformed_patch_is_refused(
    stack: FakeStack, old: str, new: str, problem: str, line: int | None
) -> None:
    path = stack.patch("first")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SeriesError, match=problem) as caught:
        load_series(stack.project, "v1.0")
    assert (caught.value.release, caught.value.step) == ("v1.0", "first")
    assert caught.value.path is not None and caught.value.hint is not None
    if line is not None:
        assert caught.value.path == f"{path}:{line}"


def test_a_truncated_patch_is_refused(stack: FakeStack) -> None:
    path = stack.patch("first")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(SeriesError, match="does not count its lines"):
        load_series(stack.project, "v1.0")


def test_trailers_are_the_last_paragraph_alone() -> None:
    text = "Subject\n\nTest: this is prose here.\nYes.\n\nRemoval: later\n"
    subject, message, trailers = split_text(text)
    assert (subject, message) == ("Subject", "Test: this is prose here.\nYes.")
    assert trailers == Trailers(removal="later")
