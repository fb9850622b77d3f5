# SPDX-License-Identifier: Apache-2.0
"""Steps that a release does not need, found by their own tests."""

from pathlib import Path

import pytest
from fake_stack import git, message
from tiny_stack import HEADER, TWO, VALUE, TinyStack

from xpustack.refresh.refresh import RefreshReport, refresh


@pytest.fixture
def stack(tmp_path: Path) -> TinyStack:
    """A stack with one step on v1.0, which v3.0 may not need."""
    stack = TinyStack(tmp_path)
    stack.add("raise-value", {VALUE: TWO})
    return stack


def publish(stack: TinyStack, value: str, edits: dict[str, str] | None = None) -> None:
    """Pin a release v3.0 whose `vllm/value.py` reads `value`, with other edits."""
    stack.publish("3.0", {VALUE: HEADER + value, **(edits or {})})


def carry(stack: TinyStack, **options) -> RefreshReport:
    return refresh(
        stack.project,
        stack.cache,
        "v3.0",
        "v1.0",
        offline=True,
        **{"tests": True, **options},
    )


def outcomes(refreshed: RefreshReport) -> list[str]:
    return [step.outcome for step in refreshed.steps]


def test_a_conflicting_step_whose_test_passes_is_obsolete(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 1 + 1\nOLD = 1\n")
    refreshed = carry(stack, write=True)
    (step,) = refreshed.steps
    assert (step.step, step.outcome) == ("raise-value", "obsolete")
    assert step.text == "its test passes without it"
    assert stack.slugs("v3.0") == []


def test_a_step_that_fits_but_is_not_needed_is_left_out(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 1\nOLD = 1\n\n\n\n\nVALUE = 2\n")
    work = stack.root / "carry"
    refreshed = carry(stack, directory=work)
    assert outcomes(refreshed) == ["obsolete"]
    assert outcomes(carry(stack, directory=work)) == ["obsolete"]


def test_a_conflicting_step_whose_test_fails_is_a_conflict(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 7\nOLD = 1\n")
    assert outcomes(carry(stack)) == ["conflict"]


def test_a_step_that_is_needed_is_carried(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 1\nOLD = 1\n\n\n\n\nMORE = 2\n")
    assert outcomes(carry(stack, write=True)) == ["clean"]
    assert stack.slugs("v3.0") == ["raise-value"]


def test_what_a_person_did_stays_when_an_earlier_step_is_obsolete(
    stack: TinyStack,
) -> None:
    package = "vllm/__init__.py"
    stack.add("name", {package: HEADER + "NAME = 1\n"})
    value = "import os\n\nVALUE = 1\nOLD = 1\n\n\n\n\nVALUE = 2\n"
    publish(stack, value, {package: HEADER + "NAME = 3\n"})
    work = stack.root / "carry"
    options = {"directory": work, "tests": False, "test": ("raise-value",)}
    assert outcomes(carry(stack, **options)) == ["clean", "conflict"]
    (work / package).write_text(HEADER + "NAME = 4\n")
    git(work, "add", package)
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    (work / "vllm/platforms.py").write_text(HEADER)
    git(work, "commit", "-qam", message("by-hand"))
    refreshed = carry(stack, write=True, **options)
    assert outcomes(refreshed) == ["obsolete", "resolved"]
    assert stack.slugs("v3.0") == ["name", "by-hand"]
    applied = stack.apply("there", "v3.0")
    assert (applied / package).read_text() == HEADER + "NAME = 4\n"
    assert (applied / VALUE).read_text() == HEADER + value
