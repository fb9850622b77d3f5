# SPDX-License-Identifier: Apache-2.0
"""What faults a module gets, and what is left alone."""

import pytest

from stack.mutation.mutants import Mutant, mutants
from stack.mutation.trial import added_lines


def on(source: str, *lines: int) -> list[Mutant]:
    """The mutants of a module on some lines, or on all."""
    return mutants(source, lines or range(1, source.count("\n") + 2))


def said(source: str, *lines: int) -> list[str]:
    return [mutant.what for mutant in on(source, *lines)]


def changed(source: str, what: str) -> str:
    """The line of a module that has the fault."""
    (mutant,) = (each for each in on(source) if each.what == what)
    return mutant.source.splitlines()[mutant.line - 1].strip()


LOOP = """\
for row in rows:
    if row < 3 and not row.done:
        take(row)
        continue
    last(row)
"""


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("continue -> break", "break"),
        ("deleted: continue", "pass"),
        ("deleted: take(row)", "pass"),
        ("dropped: row < 3", "if (not row.done):"),
        ("dropped: not row.done", "if (row < 3):"),
        ("row < 3 -> row <= 3", "if (row <= 3) and not row.done:"),
        ("3 -> 4", "if row < (4) and not row.done:"),
        ("deleted: last(row)", "pass"),
    ],
)
def test_each_fault_is_one_change(what: str, line: str) -> None:
    assert changed(LOOP, what) == line
    assert len(on(LOOP)) == 8


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        ("if found:\n    pass\n", "negated: found", "if (not (found)):"),
        ("x = a if b(c) else d\n", "negated: b(c)", "x = a if (not (b(c))) else d"),
        ("x = a is None\n", "a is None -> a is not None", "x = (a is not None)"),
        ("x = a not in b\n", "a not in b -> a in b", "x = (a in b)"),
        ("x[i] = a - b\n", "a - b -> a + b", "x[i] = (a + b)"),
        ("f(on=True)\n", "True -> False", "f(on=(False))"),
        ("x = 'ä', a // 2\n", "a // 2 -> a * 2", "x = 'ä', (a * 2)"),
        ("x = a or b or c\n", "dropped: b", "x = (a or c)"),
    ],
)
def test_kinds_of_faults(source: str, what: str, line: str) -> None:
    assert changed(source, what) == line


@pytest.mark.parametrize(
    "source",
    [
        '"""A page of 3."""\n',
        "import numpy as np\n",
        "def f(x: Literal[1] = None) -> Literal[2]:\n    '''1'''\n    ...\n",
        "logger.info('%d of', 3)\n",
        "x = f'{a + 1} rows'\n",
        "x = 'at ' + name\n",
        "@cache(1)\nclass A(B[1]):\n    pass\n",
        "if TYPE_CHECKING:\n    pass\n",
        "def f():\n    x = read()\n    yield\n",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert said(source) == []


def test_an_error_may_go_but_its_words_stay() -> None:
    assert said("raise ValueError(f'{n} of', 3)\n") == [
        "deleted: raise ValueError(f'{n} of', 3)"
    ]


def test_a_name_that_is_bound_once_stays() -> None:
    """Without it the next line that reads it fails, which shows that it is run."""
    source = (
        "def f(a):\n    b = g(a)\n    c = b\n    if a:\n        c = a\n    h(b, c)\n"
    )
    assert [what for what in said(source) if "deleted" in what] == [
        "deleted: c = b",
        "deleted: c = a",
        "deleted: h(b, c)",
    ]


def test_only_the_lines_that_are_asked_for() -> None:
    assert {mutant.line for mutant in on(LOOP, 3, 5)} == {3, 5}
    assert on(LOOP, 1) == []


def test_an_operand_counts_by_its_own_line() -> None:
    source = "x = (\n    a\n    and b\n)\n"
    assert said(source, 3) == ["dropped: b"]


def test_each_is_python() -> None:
    for mutant in on(LOOP):
        compile(mutant.source, "mutant", "exec")
    with pytest.raises(SyntaxError):
        mutants("if:\n", [1])


def test_added_lines() -> None:
    assert added_lines("a\nb\nc\n", "a\nx\nc\nd\n") == {2, 4}
    assert added_lines("", "a\nb\n") == {1, 2}
