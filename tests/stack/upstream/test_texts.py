# SPDX-License-Identifier: Apache-2.0
"""What the text of a request says, from the checks and from a person."""

import pytest
from exports import files, written
from tiny_stack import HEADER, TinyStack

from stack.checks.run import run
from stack.core.errors import SeriesError, UsageError
from stack.core.rows import read_rows
from stack.series.overlay import TRITON_IN_VLLM
from stack.series.tree import KERNEL_HOME
from stack.upstream.export import ExportResult
from stack.upstream.form import TEST_HOME
from stack.upstream.texts import Template, describe

PYTEST = ".venv/bin/python -m pytest"
SCALES = (
    "from importlib.util import find_spec\n\n\n"
    "def test_scale():\n"
    "    assert find_spec('vllm.model_executor')\n"
    "    from vllm.model_executor.kernels.xpu_dsv4 import scale\n\n"
    "    assert scale.double(2) == 4\n"
)


def test_a_description_says_what_was_shown(exported: ExportResult) -> None:
    text = (exported.directory / "pull-requests/raise-again.md").read_text()
    assert text.startswith("# [XPU] Do raise-again\n\n## Purpose\n\nWhy.\n")
    assert "Needs 2 earlier changes first; of this branch only the last commit" in text
    assert "\n- [XPU] Do raise-value\n" in text
    assert f"\nOn an XPU:\n\n```sh\n{PYTEST} {TEST_HOME}/test_three.py\n" in text
    claims = describe(exported.requests[-1], Template(("Claims",)), "v9.9")
    assert f"- Tests in `{TEST_HOME}/test_three.py`: 1 of 2 red without it" in claims
    assert "2 passed, 1 of them failed before" in text
    assert "| `test_value` | AssertionError: assert 2 == 3 | passes |" in text
    assert "ruff check" in text and "an Intel GPU | **not run**" in text
    assert "CUDA, ROCm | not run" in text and "AI assistance was used" in text
    cover = (exported.directory / "cover.md").read_text()
    row = "| 2 | [XPU] Do raise-again | `xpu-dsv4/raise-again` | after 1 other step |"
    assert row in cover
    assert "### Ready\n\n- `raise-value`\n" in cover
    assert "### Wait for another request\n\n- `raise-again`: after `raise-v" in cover
    rows = read_rows(exported.directory / "requests.csv")
    assert [row["stands"] for row in rows] == ["alone", "after raise-value"]


NOTES = """\
Title: [Bugfix][XPU] Raise it twice
With: raise-value

## Motivation

Twice is better.

## Ran elsewhere

On an abacus.
"""


def test_notes_put_two_steps_into_one_request(stack: TinyStack) -> None:
    stack.write("patches/raise-again/request.md", NOTES)
    place = written(stack, slugs=("raise-again",)).directory
    text = place / "pull-requests/raise-again.md"
    content = text.read_text()
    assert content.startswith("# [Bugfix][XPU] Raise it twice\n")
    assert "### Motivation\n\nTwice is better.\n" in content
    assert "On an abacus." in content and "CUDA, ROCm" not in content
    assert (
        "Needs 1 earlier change first; of this branch only the last 2 comm" in content
    )
    assert "### Commit 1: [XPU] Do raise-value\n\nWhy.\n" in content
    assert "### Commit 2: [XPU] Do raise-again\n\nWhy.\n" in content
    assert "/test_value.py` | CPU, the XPU platform emulated |" in content
    rows = read_rows(place / "requests.csv")
    assert [row["request"] for row in rows] == ["raise-again", "raise-again"]
    assert list(files(place / "mails")) == [
        "raise-again/0001-XPU-Do-raise-value.patch",
        "raise-again/0002-XPU-Do-raise-again.patch",
        "tests/0001-Test-XPU-DSv4-Add-what-DeepSeek-V4-s-tests-on-XPU-sh.patch",
    ]


def test_notes_alone_change_an_export(stack: TinyStack, exported: ExportResult) -> None:
    stack.write("patches/raise-value/request.md", "## Overview\n\nMore.\n")
    again = written(stack)
    assert (again.changed, again.state.number) == (True, 2)
    assert "More." in (again.directory / "pull-requests/raise-value.md").read_text()
    assert not written(stack).changed


def test_a_request_lacks_no_title_that_a_step_taken_along_has(stack: TinyStack) -> None:
    stack.write(
        "patches/raise-value/request.md", "Title: [XPU] One\n\n## Limits\n\nNone."
    )
    stack.write("patches/raise-again/request.md", "With: raise-value\n")
    place = written(stack, slugs=("raise-again",)).directory
    text = (place / "pull-requests/raise-again.md").read_text()
    assert text.startswith("# [XPU] One\n") and "### Limits\n\nNone." in text


@pytest.mark.parametrize("named", ["raise-again", "raise"])
def test_no_later_or_unknown_step_can_be_needed(stack: TinyStack, named: str) -> None:
    stack.write("patches/raise-value/request.md", f"After: {named}\n")
    with pytest.raises(UsageError, match=f"no step '{named}'"):
        written(stack)


def test_lines_of_kernels_are_counted_apart(stack: TinyStack) -> None:
    scale = HEADER + "def double(x):\n    return x + x\n"
    for module, text in {"__init__": HEADER, "_triton": "", "scale": scale}.items():
        stack.write(f"kernels/xpu_dsv4/{module}.py", text)
    stack.write("tests/steps/test_scale.py", HEADER + SCALES)
    brought = {
        f"{KERNEL_HOME}/__init__.py": HEADER,
        f"{KERNEL_HOME}/_triton.py": TRITON_IN_VLLM.decode(),
        f"{KERNEL_HOME}/scale.py": scale,
    }
    test, failure = "tests/steps/test_scale.py", "assert None"
    stack.add("bring-scale", brought, "v1.0", test, failure, kernels="scale")
    run(stack.project, stack.cache, [stack.release])
    (request,) = written(stack, slugs=("bring-scale",)).requests
    assert (request.lines, request.kernels) == (0, 2 * HEADER.count("\n") + 2)
    text = (stack.root / "out/pull-requests/bring-scale.md").read_text()
    assert f"kernels and tests, {request.kernels} in new kernels." in text


@pytest.mark.parametrize("text", ["Headline: x\n", "## Reasons\n\nx\n"])
def test_notes_that_nobody_reads_are_refused(stack: TinyStack, text: str) -> None:
    stack.write("patches/raise-again/request.md", text)
    with pytest.raises(SeriesError, match=r"neither|no section") as caught:
        written(stack)
    assert "Motivation" in (caught.value.hint or "")


def test_a_description_names_the_related_requests(stack: TinyStack) -> None:
    patch = stack.patch("raise-again")
    related = "Related: vllm-project/vllm#7\nRelated: vllm-project/vllm-xpu-kernels#8\n"
    patch.write_text(patch.read_text().replace("Removal:", related + "Removal:"))
    run(stack.project, stack.cache, [stack.release])
    text = (written(stack).directory / "pull-requests/raise-again.md").read_text()
    section = text[text.index("## Not a duplicate") :]
    assert "- vllm-project/vllm#7\n- vllm-project/vllm-xpu-kernels#8\n" in section
    visible, _, hidden = section.partition("<!--")
    assert "gh " not in visible
    assert "gh issue view 8 --repo vllm-project/vllm-xpu-kernels" in hidden
    assert "--search '7 in:body'" in hidden and "--search 'XPU raise again'" in hidden
