# SPDX-License-Identifier: Apache-2.0
"""Obsolete steps, recognized by their own tests."""

import shutil
from pathlib import Path

import pytest
from fake_stack import git, message
from sdists import pinned, write_sdist
from tiny_stack import BASE, HEADER, TWO, VALUE, TinyStack

from xpustack.base.pin import release_entry
from xpustack.refresh.refresh import RefreshReport, refresh


@pytest.fixture
def stack(tmp_path: Path) -> TinyStack:
    """A stack with one step on v1.0, which v3.0 may not need."""
    stack = TinyStack(tmp_path)
    stack.add("raise-value", {VALUE: TWO})
    return stack


def publish(stack: TinyStack, value: str, edits: dict[str, str] | None = None) -> None:
    """Pin a release v3.0 whose `vllm/value.py` reads `value`, with other edits."""
    files = {**BASE, "VERSION": "3.0", VALUE: HEADER + value, **(edits or {})}
    sdist = write_sdist(
        stack.root / "vllm-3.0.tar.gz",
        {name: text.encode() for name, text in files.items()},
    )
    release = pinned(sdist)
    place = stack.cache.sdists / release.sha256 / sdist.name
    place.parent.mkdir(parents=True)
    shutil.copyfile(sdist, place)
    with open(stack.project.releases_file, "a") as file:
        file.write("\n" + release_entry(release))


def carry_over(stack: TinyStack, **options) -> RefreshReport:
    return refresh(
        stack.project,
        stack.cache,
        "v3.0",
        "v1.0",
        offline=True,
        **{"tests": True, **options},
    )


def test_a_conflicting_step_whose_test_passes_is_obsolete(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 1 + 1\nOLD = 1\n")
    done = carry_over(stack, write=True)
    assert [(step.step, step.outcome) for step in done.steps] == [
        ("raise-value", "obsolete")
    ]
    assert done.steps[0].text == "its test passes without it"
    assert stack.slugs("v3.0") == []


def test_a_step_that_fits_but_is_not_needed_is_left_out(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 1\nOLD = 1\n\n\n\n\nVALUE = 2\n")
    work = stack.root / "carry"
    done = carry_over(stack, directory=work)
    assert [step.outcome for step in done.steps] == ["obsolete"]
    assert [step.outcome for step in carry_over(stack, directory=work).steps] == [
        "obsolete"
    ]


def test_a_conflicting_step_whose_test_fails_is_a_conflict(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 7\nOLD = 1\n")
    assert [step.outcome for step in carry_over(stack).steps] == ["conflict"]


def test_a_step_that_is_needed_is_carried(stack: TinyStack) -> None:
    publish(stack, "import os\n\nVALUE = 1\nOLD = 1\n\n\n\n\nMORE = 2\n")
    assert [step.outcome for step in carry_over(stack, write=True).steps] == ["clean"]
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
    steps = carry_over(stack, **options).steps
    assert [step.outcome for step in steps] == ["clean", "conflict"]
    (work / package).write_text(HEADER + "NAME = 4\n")
    git(work, "add", package)
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    (work / "vllm/platforms.py").write_text(HEADER)
    git(work, "commit", "-qam", message("by-hand"))
    done = carry_over(stack, write=True, **options)
    assert [step.outcome for step in done.steps] == ["obsolete", "resolved"]
    assert stack.slugs("v3.0") == ["name", "by-hand"]
    applied = stack.apply("there", "v3.0")
    assert (applied / package).read_text() == HEADER + "NAME = 4\n"
    assert (applied / VALUE).read_text() == HEADER + value
