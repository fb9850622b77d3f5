# SPDX-License-Identifier: Apache-2.0
"""The rules by which two runs prove a step, each on its own."""

import pytest

from stack.steptest.verdict import (
    CollectionProblem,
    ModuleRun,
    Test,
    judge,
    judge_on_cpu,
)

GREEN = Test("test_a.py::test_new", "passed")
RED = Test("test_a.py::test_new", "failed", text="AssertionError: assert 1 == 2")
SAME = Test("test_a.py::test_same", "passed", unchanged=True)
MISSING = CollectionProblem(
    "test_a.py", "failed", "E   ImportError: no module attention"
)
IMPORT = Test(
    "test_a.py::test_new", "error", import_error=True, text="ImportError: no attention"
)


def verdict(
    before: ModuleRun, after: ModuleRun, failure="assert 1 == 2", imports=False
):
    return "\n".join(judge(before, after, failure, imports=imports))


def test_a_step_is_proven_by_red_then_green():
    assert verdict(ModuleRun((RED, SAME)), ModuleRun((GREEN, SAME))) == ""


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (ModuleRun((GREEN,)), ModuleRun((GREEN,)), "passes before the step"),
        (
            ModuleRun((RED,)),
            ModuleRun((RED,)),
            "test_new fails after the step: AssertionError",
        ),
        (
            ModuleRun((RED, Test("t::test_same", "failed", unchanged=True))),
            ModuleRun((GREEN, Test("t::test_same", "passed", unchanged=True))),
            "marked unchanged but fails before",
        ),
        (
            ModuleRun((RED, SAME)),
            ModuleRun((GREEN, Test(SAME.id, "failed", unchanged=True))),
            "test_same fails after",
        ),
        (ModuleRun((IMPORT,)), ModuleRun((GREEN,)), "only by ImportError"),
        (
            ModuleRun(collection=(MISSING,)),
            ModuleRun((GREEN,)),
            "cannot be collected there",
        ),
        (
            ModuleRun((RED,)),
            ModuleRun(collection=(MISSING,)),
            "cannot be collected after",
        ),
        (ModuleRun((RED,)), ModuleRun(), "holds no test"),
        (ModuleRun((SAME,)), ModuleRun((SAME,)), "nothing fails before"),
        (
            ModuleRun((SAME,)),
            ModuleRun((GREEN, SAME)),
            "does not exist on the tree before",
        ),
        (
            ModuleRun((RED,)),
            ModuleRun(crash="killed after 300 s"),
            "killed after 300 s",
        ),
        (ModuleRun(crash="killed"), ModuleRun((GREEN,)), "before the step: killed"),
        (
            ModuleRun((RED,)),
            ModuleRun((Test(GREEN.id, "skipped", text="no XPU"),)),
            "is skipped after the step: no XPU",
        ),
        (ModuleRun((RED,)), ModuleRun((Test(GREEN.id, "xfailed"),)), "marked xfail"),
        (
            ModuleRun(collection=(CollectionProblem("t", "skipped", "no torch"),)),
            ModuleRun((GREEN,)),
            "the module skips itself before the step: no torch",
        ),
    ],
)
def test_what_proves_nothing_is_named(before, after, problem):
    assert problem in verdict(before, after)


def test_the_failure_must_be_the_one_that_the_step_names():
    other = Test(RED.id, "failed", text="TypeError: unexpected")
    text = verdict(ModuleRun((other,)), ModuleRun((GREEN,)))
    assert "no failure before the step matches" in text
    assert "TypeError: unexpected" in text


def test_an_import_error_beside_a_real_failure_is_no_problem():
    second = Test("test_a.py::test_b", "passed")
    first = Test("test_a.py::test_b", "failed", import_error=True, text="ImportError")
    assert verdict(ModuleRun((RED, first)), ModuleRun((GREEN, second))) == ""


def test_a_marked_skip_is_no_failure():
    skip = Test("test_a.py::test_gpu", "skipped", may_skip=True, text="no XPU")
    assert verdict(ModuleRun((RED, skip)), ModuleRun((GREEN, skip))) == ""


def test_where_the_import_is_the_defect_it_counts_but_must_match():
    before = ModuleRun(collection=(MISSING,))
    assert (
        verdict(before, ModuleRun((GREEN,)), "no module attention", imports=True) == ""
    )
    text = verdict(before, ModuleRun((GREEN,)), "no module rope", imports=True)
    assert "no failure before the step matches" in text


def test_a_step_whose_modules_nothing_calls_may_fail_by_import_but_not_pass():
    assert verdict(ModuleRun((IMPORT,)), ModuleRun((GREEN,)), None) == ""
    assert "passes before" in verdict(ModuleRun((GREEN,)), ModuleRun((GREEN,)), None)


ANYWHERE = Test(SAME.id, "passed", unchanged=True, any_platform=True)
SKIPPED = Test(SAME.id, "skipped", unchanged=True, any_platform=True, text="no Triton")
BROKEN = Test(SAME.id, "failed", unchanged=True, any_platform=True, text="No: kernel")
FIXES = Test(SAME.id, "passed", any_platform=True)
FIXED = Test(SAME.id, "failed", any_platform=True, text="No: kernel")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (ModuleRun((ANYWHERE, RED)), ModuleRun((ANYWHERE, RED)), ""),
        (None, ModuleRun((ANYWHERE,)), ""),
        (ModuleRun((FIXED,)), ModuleRun((FIXES,)), ""),
        (
            ModuleRun((FIXES,)),
            ModuleRun((FIXES,)),
            "test_same passes on a CPU before the step: it proves nothing there",
        ),
        (
            ModuleRun((FIXED,)),
            ModuleRun((FIXED,)),
            "test_same fails on a CPU after the step: No: kernel",
        ),
        (
            ModuleRun((BROKEN,)),
            ModuleRun((ANYWHERE,)),
            "test_same fails on a CPU before the step: No: kernel",
        ),
        (
            ModuleRun((ANYWHERE,)),
            ModuleRun((SKIPPED,)),
            "test_same is skipped on a CPU after the step: no Triton",
        ),
        (
            ModuleRun(collection=(MISSING,)),
            ModuleRun((ANYWHERE,)),
            "cannot be collected on a CPU before the step",
        ),
        (
            ModuleRun((ANYWHERE,)),
            ModuleRun(crash="it ended with exit status 7"),
            "no result on a CPU after the step",
        ),
    ],
)
def test_what_needs_no_xpu_passes_on_a_cpu(before, after, problem):
    found = "\n".join(judge_on_cpu(before, after))
    assert problem in found and bool(problem) == bool(found)
