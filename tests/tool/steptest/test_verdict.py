# SPDX-License-Identifier: Apache-2.0
"""The rules by which two runs prove a step, one by one."""

import pytest

from xpustack.steptest.verdict import Run, Test, Uncollected, judge

GREEN = Test("test_a.py::test_new", "passed")
RED = Test("test_a.py::test_new", "failed", text="AssertionError: assert 1 == 2")
SAME = Test("test_a.py::test_same", "passed", unchanged=True)
MISSING = Uncollected("test_a.py", "failed", "E   ImportError: no module attention")
IMPORT = Test(
    "test_a.py::test_new", "error", import_error=True, text="ImportError: no attention"
)


def verdict(before: Run, after: Run, failure="assert 1 == 2", imports=False):
    return "\n".join(judge(before, after, failure, imports=imports))


def test_a_step_is_proven_by_red_then_green():
    assert verdict(Run((RED, SAME)), Run((GREEN, SAME))) == ""


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (Run((GREEN,)), Run((GREEN,)), "passes before the step"),
        (Run((RED,)), Run((RED,)), "test_new fails after the step: AssertionError"),
        (
            Run((RED, Test("t::test_same", "failed", unchanged=True))),
            Run((GREEN, Test("t::test_same", "passed", unchanged=True))),
            "marked unchanged but fails before",
        ),
        (
            Run((RED, SAME)),
            Run((GREEN, Test(SAME.id, "failed", unchanged=True))),
            "test_same fails after",
        ),
        (Run((IMPORT,)), Run((GREEN,)), "only by ImportError"),
        (Run(collection=(MISSING,)), Run((GREEN,)), "cannot be collected there"),
        (Run((RED,)), Run(collection=(MISSING,)), "cannot be collected after"),
        (Run((RED,)), Run(), "holds no test"),
        (Run((SAME,)), Run((SAME,)), "nothing fails before"),
        (Run((SAME,)), Run((GREEN, SAME)), "does not exist on the tree before"),
        (Run((RED,)), Run(crash="killed after 300 s"), "killed after 300 s"),
        (Run(crash="killed"), Run((GREEN,)), "before the step: killed"),
        (
            Run((RED,)),
            Run((Test(GREEN.id, "skipped", text="no XPU"),)),
            "is skipped after the step: no XPU",
        ),
        (Run((RED,)), Run((Test(GREEN.id, "xfailed"),)), "marked xfail"),
        (
            Run(collection=(Uncollected("t", "skipped", "no torch"),)),
            Run((GREEN,)),
            "the module skips itself before the step: no torch",
        ),
    ],
)
def test_what_proves_nothing_is_named(before, after, problem):
    assert problem in verdict(before, after)


def test_the_failure_must_be_the_one_that_the_step_names():
    other = Test(RED.id, "failed", text="TypeError: unexpected")
    text = verdict(Run((other,)), Run((GREEN,)))
    assert "no failure before the step matches" in text
    assert "TypeError: unexpected" in text


def test_an_import_error_beside_a_real_failure_is_no_problem():
    second = Test("test_a.py::test_b", "passed")
    first = Test("test_a.py::test_b", "failed", import_error=True, text="ImportError")
    assert verdict(Run((RED, first)), Run((GREEN, second))) == ""


def test_a_marked_skip_is_no_failure():
    skip = Test("test_a.py::test_gpu", "skipped", may_skip=True, text="no XPU")
    assert verdict(Run((RED, skip)), Run((GREEN, skip))) == ""


def test_where_the_import_is_the_defect_it_counts_but_must_match():
    before = Run(collection=(MISSING,))
    assert verdict(before, Run((GREEN,)), "no module attention", imports=True) == ""
    text = verdict(before, Run((GREEN,)), "no module rope", imports=True)
    assert "no failure before the step matches" in text


def test_a_step_whose_modules_nothing_calls_may_fail_by_import_but_not_pass():
    assert verdict(Run((IMPORT,)), Run((GREEN,)), None) == ""
    assert "passes before" in verdict(Run((GREEN,)), Run((GREEN,)), None)
