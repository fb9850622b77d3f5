# SPDX-License-Identifier: Apache-2.0
"""Faults in a step of a small release, whose test does not see them all."""

from pathlib import Path

import pytest
from tiny_stack import HEADER, VALUE, TinyStack

from stack.core.errors import SeriesError
from stack.mutation.__main__ import ALLOWED, main
from stack.mutation.survivors import read_survivors

STEP = (
    HEADER
    + "import os\n\nVALUE = 2\nOLD = 1\n\n\n"
    + "def most(rows, bound):\n"
    + "    if rows is None or rows > bound:\n"
    + "        return bound\n"
    + "    while rows < 0:\n"
    + "        rows += 1\n"
    + "    return rows\n"
)
TEST = (
    HEADER
    + "from vllm import value\n\n\n"
    + "def test_value():\n"
    + "    assert value.VALUE == 2\n"
    + "    assert value.most(3, 2) == 2 and value.most(-1, 2) == 0\n"
)
NONE = "if rows is None or rows > bound:"


def allow(stack: TinyStack, *rows: dict[str, str]) -> None:
    text = "".join(
        "[[survivor]]\n" + "".join(f'{key} = "{row[key]}"\n' for key in row)
        for row in rows
    )
    stack.write(ALLOWED, text or "survivor = []\n")


def row(code: str, fault: str, reason: str = "for the test") -> dict[str, str]:
    step = {"step": "more", "path": VALUE, "code": code}
    return {**step, "fault": fault, "reason": reason}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    stack = TinyStack(tmp_path_factory.mktemp("mutation"))
    stack.add("more", {VALUE: STEP, "tests/test_value.py": STEP})
    return stack


@pytest.fixture
def stack(built: TinyStack, monkeypatch: pytest.MonkeyPatch) -> TinyStack:
    stack = built
    stack.write("tests/steps/test_value.py", TEST)
    allow(stack)
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    return stack


def test_survivors_are_named_and_the_build_keeps_its_files(
    stack: TinyStack, capsys: pytest.CaptureFixture[str]
) -> None:
    allow(
        stack,
        row(NONE, "rows > bound -> rows >= bound", "the same value"),
        row("return bound", "deleted: return bound"),
    )
    only = ["--only", "rows > bound", "--only", "return bound"]
    assert main(["v1.0", "more", *only]) == 1
    lines = capsys.readouterr().out.splitlines()
    place = f"{VALUE}:9: `{NONE}`"
    assert f"survives: {place}, dropped: rows is None" in lines
    assert f"seen:     {place}, dropped: rows > bound" in lines
    assert f"allowed:  {place}, rows > bound -> rows >= bound (the same value)" in lines
    gone = f"seen:     {VALUE}:10: `return bound`, deleted: return bound"
    assert f"{gone}, take it off the list" in lines
    assert lines[-1] == f"1 faults survive that {ALLOWED} does not allow"
    modules = stack.cache.builds.glob(f"*/site/{VALUE}")
    assert STEP in [module.read_text() for module in modules]


def test_a_run_without_end_is_seen(
    stack: TinyStack,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stack.mutation.trial._LEAST", 3.0)
    assert main(["v1.0", "more", "--only", "rows += 1`, deleted"]) == 0
    assert "seen:     vllm/value.py:12: `rows += 1`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["v3.0", "more"], "v3.0"),
        (["v1.0", "less"], "less"),
    ],
)
def test_what_is_not_there(
    stack: TinyStack,
    words: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words) != 0
    assert reason in capsys.readouterr().err


def test_a_red_test_is_an_error(
    stack: TinyStack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.write("tests/steps/test_value.py", TEST.replace("== 2", "== 5", 1))
    assert main(["v1.0", "more"]) != 0
    said = capsys.readouterr().err
    assert "fails without a fault" in said and "xpustack check v1.0 more" in said


def test_tests_that_need_their_order_are_an_error(
    stack: TinyStack, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "\n\nSEEN = []\n\n\ndef test_first():\n    SEEN.append(1)\n"
    later = "\n\ndef test_later():\n    assert SEEN and value.most(3, 2) == 2\n"
    test = HEADER + "from vllm import value\n" + first + later
    stack.write("tests/steps/test_value.py", test)
    assert main(["v1.0", "more", "--only", "return bound"]) != 0
    said = capsys.readouterr()
    assert "seen: " in said.out and "fails without a fault" in said.err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("survivor = 3\n", "Expected `array`"),
        ("[[survivor]]\nstep = 'more'\n", "missing required field `path`"),
        ("[[survivor]\n", "Expected"),
    ],
)
def test_a_malformed_list(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "survivors.toml"
    path.write_text(text)
    with pytest.raises(SeriesError, match=reason):
        read_survivors(path)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row("a", "b"), row("a", "b")], "is there twice"),
        ([row("a", "b", " ")], "has no reason"),
    ],
)
def test_a_list_that_says_nothing(
    stack: TinyStack, rows: list[dict[str, str]], reason: str
) -> None:
    allow(stack, *rows)
    with pytest.raises(SeriesError, match=reason):
        read_survivors(stack.project.root / ALLOWED)


def test_the_list_of_this_stack() -> None:
    assert read_survivors(Path(__file__).parents[3] / ALLOWED)
