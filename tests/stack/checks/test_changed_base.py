# SPDX-License-Identifier: Apache-2.0
"""Runs over a stack whose archives or shared kernels changed under its series."""

import contextlib
import shutil
from pathlib import Path

import pytest
from tiny_stack import BASE, HEADER, VALUE, TinyStack

from stack.checks import run as checks
from stack.core.cache import Cache
from stack.core.errors import ApplyError
from stack.series.overlay import TRITON_IN_VLLM
from stack.series.result import Report, Result
from stack.series.tree import KERNEL_HOME

SCALES = """\
from importlib.util import find_spec


def test_scale():
    assert find_spec("vllm.model_executor")
    from vllm.model_executor.kernels.xpu_dsv4 import scale

    assert scale.double(2) == 4
"""
"""A step's test, by the kernel's first form."""


def check(stack: TinyStack) -> Report:
    """Every release."""
    return checks.run(stack.project, stack.cache, stack.releases)


def states(report: Report) -> list[str]:
    return [f"{r.release} {r.step} {r.kind} {r.status}" for r in report.results]


def failures(report: Report) -> list[Result]:
    return [result for result in report.results if result.status == "failed"]


@pytest.fixture
def stack(tiny: TinyStack, tmp_path: Path) -> TinyStack:
    """A copy of `tiny` and of its cache."""
    return tiny.copy(tmp_path / "stack")


def test_an_archive_that_left_the_index_fails_its_release_alone(stack, links):
    release = stack.release
    kept = stack.cache.sdists / release.sha256 / release.sdist
    other = stack.releases["v2.0"]
    shutil.copy(stack.cache.sdists / other.sha256 / other.sdist, links)
    stack.cache = Cache(stack.root / "empty cache")
    report = check(stack)
    (failed,) = failures(report)
    assert (failed.release, failed.kind) == ("v1.0", "apply")
    assert failed.summary == "none of pip's indexes and find-links has the archive"
    assert any(release.sdist in line for line in failed.detail), failed
    assert any("next: " in line for line in failed.detail), failed
    assert "v2.0 raise-value test passed" in states(report)
    shutil.copy(kept, links)
    report = check(stack)
    assert not failures(report)
    assert all(r.cached for r in report.results if r.release == "v2.0")


@pytest.mark.parametrize(
    ("edits", "status"),
    [
        # Another file than the step's: the step applies, and everything runs anew.
        ({"vllm/__init__.py": HEADER + "NEW = 1\n"}, "passed"),
        # The very line that the step changes.
        ({VALUE: BASE[VALUE].replace("VALUE = 1", "VALUE = 3")}, "failed"),
    ],
)
def test_a_patch_release_reuses_nothing_of_the_release_before(stack, edits, status):
    check(stack)
    stack.publish("2.0.1", edits)
    shutil.copytree(
        stack.project.series_dir("v2.0"), stack.project.series_dir("v2.0.1")
    )
    with contextlib.suppress(ApplyError):
        stack.rederive()
    report = check(stack)
    mine = [result for result in report.results if result.release == "v2.0.1"]
    assert {result.status for result in mine} == {status}
    assert not any(result.cached for result in mine)
    assert all(r.cached for r in report.results if r.release != "v2.0.1")
    if status == "failed":
        (failed,) = mine
        assert (failed.step, failed.kind) == ("raise-value", "apply")
        assert any(VALUE in line for line in (failed.summary, *failed.detail)), failed
        assert any("next: " in line for line in failed.detail), failed


def test_a_kernel_that_another_release_needs_in_an_older_form(stack):
    """The older release fails by name. With the older form as a module of its own,
    which its series names, both pass."""
    first = HEADER + "def double(x):\n    return x + x\n"
    for module, text in {"__init__": HEADER, "_triton": "", "scale": first}.items():
        stack.write(f"kernels/xpu_dsv4/{module}.py", text)
    stack.write("tests/steps/test_scale.py", SCALES)
    brought = {
        f"{KERNEL_HOME}/__init__.py": HEADER,
        f"{KERNEL_HOME}/_triton.py": TRITON_IN_VLLM.decode(),
        f"{KERNEL_HOME}/scale.py": first,
    }
    add = {"test": "tests/steps/test_scale.py", "failure": "assert None"}
    for release in ("v1.0", "v2.0"):
        stack.add("bring-scale", brought, release, kernels="scale", **add)
    report = check(stack)
    assert not failures(report), failures(report)

    newer = HEADER + "def double(x, *, by):\n    return x * by\n"
    stack.write("kernels/xpu_dsv4/scale.py", newer)
    stack.write(
        "tests/steps/test_scale_by.py", SCALES.replace("double(2)", "double(2, by=2)")
    )
    patch = stack.split("bring-scale", "v2.0")
    patch.write_text(patch.read_text().replace("test_scale.py", "test_scale_by.py"))
    stack.rederive()
    (failed,) = failures(check(stack))
    assert (failed.release, failed.step, failed.kind) == (
        "v1.0",
        "bring-scale",
        "test",
    )
    assert any("missing 1 required" in line for line in failed.detail), failed

    stack.write("kernels/xpu_dsv4/scale_by_two.py", first)
    stack.write(
        "tests/steps/test_scale.py",
        SCALES.replace("import scale", "import scale_by_two as scale"),
    )
    patch = stack.patch("bring-scale", "v1.0")
    patch.write_text(
        patch.read_text().replace("Kernels: scale\n", "Kernels: scale_by_two\n")
    )
    stack.rederive()
    report = check(stack)
    assert not failures(report), failures(report)
    assert "v2.0 bring-scale test passed" in states(report)
