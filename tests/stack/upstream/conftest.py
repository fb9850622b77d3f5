# SPDX-License-Identifier: Apache-2.0
"""A checked stack of two steps, and its export."""

import shutil
from pathlib import Path

import pytest
from exports import written
from stack_fixtures import cloned, small_disk, small_server  # noqa: F401
from tiny_stack import HEADER, PROVES, TWO, VALUE, TinyStack

from stack.checks.run import run
from stack.upstream.export import ExportResult
from stack.upstream.vllm_tests import PACKAGES

THREE = TWO.replace("VALUE = 2", "VALUE = 3")
HELPED = HEADER + (
    "import numbers_beside as beside\nimport pytest\nfrom vllm import value\n\n\n"
    "def test_value():\n    assert value.VALUE == beside.THREE\n\n\n"
    "@pytest.mark.unchanged\ndef test_old():\n    assert value.OLD == 1\n"
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """A stack with two steps, all checks green; take a copy to change it."""
    stack = TinyStack(tmp_path_factory.mktemp("export"))
    stack.write("tests/steps/test_value.py", HEADER + PROVES)
    stack.write("tests/steps/numbers_beside.py", HEADER + "THREE = 3\n")
    stack.write("tests/steps/test_three.py", HELPED)
    stack.add("raise-value", {VALUE: TWO})
    stack.add(
        "raise-again", {VALUE: THREE}, "v1.0", "tests/steps/test_three.py", "2 == 3"
    )
    done = run(stack.project, stack.cache, [stack.release])
    assert not done.failed, done.results
    return stack


@pytest.fixture
def stack(tmp_path: Path, checked: TinyStack) -> TinyStack:
    """The checked stack, its project copied and its cache shared."""
    other = object.__new__(TinyStack)
    other.root = tmp_path
    shutil.copytree(checked.project.root, tmp_path / "project")
    other.project = type(checked.project)(tmp_path / "project")
    other.cache = checked.cache
    return other


@pytest.fixture
def exported(stack: TinyStack) -> ExportResult:
    return written(stack)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What vLLM's tests import, by name alone; the plugin is loaded."""
    for module in PACKAGES.values():
        (tmp_path / "packages" / module).mkdir(parents=True)
        (tmp_path / "packages" / module / "__init__.py").touch()
    (tmp_path / "packages/pytest_asyncio/plugin.py").touch()
    return tmp_path / "packages"
