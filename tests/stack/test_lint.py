# SPDX-License-Identifier: Apache-2.0
"""Lint compares with the base, by the base's own configuration."""

import pytest
from tiny_stack import BASE, HEADER, VALUE, TinyStack

from xpustack import environment
from xpustack.errors import EnvironmentProblem
from xpustack.finding import Finding
from xpustack.lint import lint, worse
from xpustack.process import Runner
from xpustack.store import Store


@pytest.fixture(scope="module")
def linted(tmp_path_factory: pytest.TempPathFactory):
    """A function that adds a step to one stack and lints it."""
    stack = TinyStack(tmp_path_factory.mktemp("lint"))

    def add(slug: str, edits: dict[str, str]):
        stack.add(slug, edits)
        before, after = stack.trees()[-2:]
        return lint(Runner(), stack.cache, Store(stack.cache), before, after)

    return add


def finding(line: int, content: str, text: str = "F401 unused") -> Finding:
    return Finding("ruff check", "vllm/a.py", line, text, content)


def test_a_finding_that_only_moved_is_not_new():
    assert worse([finding(3, "import os")], [finding(9, "import os")]) == ()


def test_a_finding_on_an_edited_line_takes_the_place_of_the_old_one():
    assert worse([finding(3, "f(a)")], [finding(3, "f(a, b)")]) == ()


def test_one_more_of_the_same_kind_is_new():
    second = finding(4, "import sys")
    assert worse([finding(3, "import os")], [finding(3, "import os"), second]) == (
        second,
    )


def test_the_findings_of_the_base_do_not_count_and_new_ones_do(linted):
    moved = BASE[VALUE].replace("import os", "# moved\n\nimport os")
    clean = linted("clean", {VALUE: moved})
    assert clean.new == ()
    assert clean.old == 1
    assert clean.tools == ("ruff check", "ruff format", "typos", "check-spdx-header")
    assert clean.notes == (
        "needs-more not run: a-package-that-nobody-has not installed",
    )
    bad = {
        VALUE: moved + "import sys\nx  =  1\n",
        "vllm/new.py": "# the sentense\nY = 1\n",
        "vllm/fine.py": HEADER + "Y = 1\n",
    }
    found = [str(one) for one in linted("bad", bad).new]
    assert any("ruff check: E402" in text for text in found)
    assert any("F401 `sys` imported" in text for text in found)
    assert "vllm/value.py: ruff format: would be reformatted" in found
    assert "vllm/new.py: check-spdx-header: refused" in found
    typo = "sentense"
    assert f"vllm/new.py:1: typos: {typo} should be sentence" in found
    assert not any("fine.py" in text for text in found)
    assert "F401 `os`" not in "\n".join(found)


def test_a_ruff_of_another_version_is_refused(linted, monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda name: "0.0.1")
    with pytest.raises(EnvironmentProblem, match=r"ruff==.* is needed, 0\.0\.1 is"):
        linted("other", {"vllm/other.py": HEADER})
