# SPDX-License-Identifier: Apache-2.0
"""`xpustack upstream-tests` on a small stack: its answer is green only where tests of
the release ran."""

import json
from pathlib import Path

import pytest
from command_line import invoke
from tiny_stack import HEADER, TWO, VALUE, TinyStack

from stack.core.rows import read_rows

BASE = {
    "vllm/config.py": HEADER,
    "vllm/model_executor/models/registry.py": HEADER,
    "vllm/other.py": HEADER + "OTHER = 1\n",
    "tests/test_old.py": "from vllm.value import OLD\n\n\n"
    "def test_old():\n    assert OLD == 1\n",
    "tests/test_gone.py": "import nothing_of_that_name\nfrom vllm import value\n",
}
FOLLOWS = "from vllm.value import VALUE\n\n\ndef test_value():\n    assert VALUE == 1\n"
NO_CALL = "its tests were skipped, or failed in their set-up"
SKIPS = 'import pytest\n\npytest.skip("no GPU", allow_module_level=True)\n'


def stack_of(root: Path, files: dict[str, str]) -> TinyStack:
    """Release v3.0 with one step that changes a module which its tests name, and one
    that changes another module."""
    stack = TinyStack(root)
    stack.publish("3.0", files)
    stack.add("raise-value", {VALUE: TWO}, "v3.0")
    stack.add("raise-other", {"vllm/other.py": HEADER + "OTHER = 2\n"}, "v3.0")
    return stack


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    return stack_of(tmp_path_factory.mktemp("small"), BASE)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch):
    """Makes a stack the one that commands are called in."""

    def enter(stack: TinyStack) -> TinyStack:
        monkeypatch.chdir(stack.project.root)
        monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
        return stack

    return enter


def test_files_that_ran_and_files_that_did_not_are_counted(
    small: TinyStack, packages: Path, inside
) -> None:
    inside(small)
    done = invoke("upstream-tests", "v3.0", "--offline", "--packages", packages)
    assert done.exit_code == 0, done.output
    said = "1 files ran on emulated, 1 not run; 0 with other outcomes"
    assert said in done.stdout


def test_a_folder_of_packages_is_named_from_where_the_user_is(
    small: TinyStack, packages: Path, inside
) -> None:
    inside(small)
    place = small.project.root / "packages"
    packages.rename(place)
    try:
        done = invoke("upstream-tests", "v3.0", "--offline", "--packages", "packages")
    finally:
        place.rename(packages)
    assert done.exit_code == 0, done.output


def test_another_outcome_ends_with_1(tmp_path: Path, packages: Path, inside) -> None:
    inside(stack_of(tmp_path / "stack", {**BASE, "tests/test_follows.py": FOLLOWS}))
    done = invoke("upstream-tests", "v3.0", "--offline", "--packages", packages)
    assert done.exit_code == 1, done.output
    assert "2 files ran on emulated, 1 not run; 1 with other outcomes" in done.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BASE["tests/test_gone.py"], "No module named 'nothing_of_that_name'"),
        ("from vllm import value\n" + SKIPS, "no GPU"),
        (
            "import pytest\nfrom vllm import value\n\n\n"
            "@pytest.mark.skip\ndef test_it(): pass\n",
            NO_CALL,
        ),
        (
            "import pytest\nfrom vllm import value\n\n\n@pytest.fixture\n"
            "def gpu(): raise ValueError\n\n\ndef test_it(gpu): pass\n",
            NO_CALL,
        ),
    ],
    ids=["import", "module", "skip", "fixture"],
)
def test_where_no_test_ran_nothing_is_green(
    tmp_path: Path, packages: Path, inside, text: str, why: str
) -> None:
    files = {name: text for name in BASE if name.startswith("tests/")}
    stack = inside(stack_of(tmp_path / "stack", {**BASE, **files}))
    rows = stack.project.root / "docs/data/upstream_tests.csv"
    words = ("upstream-tests", "v3.0", "--offline", "--packages", packages)
    done = invoke(*words, "--write", "--json")
    answer = json.loads(done.stdout)
    (error,) = answer["errors"]
    assert done.exit_code == 1
    assert error["message"] == "no test ran, neither before nor after"
    assert why in " ".join(error["detail"])
    assert len(answer["data"]["files"]) == 2
    assert not rows.exists() or read_rows(rows) == []


def test_what_vllms_tests_import_is_asked_for_first(small: TinyStack, inside) -> None:
    """Without it pytest ends with exit status 4 for every file."""
    inside(small)
    before = set(small.cache.root.rglob("*"))
    done = invoke("upstream-tests", "v3.0", "--offline")
    assert done.exit_code == 2, done.output
    assert "vLLM's tests import what is not there: " in done.stderr
    assert "pytest-asyncio" in done.stderr
    assert done.stderr.rstrip().endswith("xpustack upstream-tests v3.0 --packages DIR")
    assert set(small.cache.root.rglob("*")) == before


def test_a_package_that_the_folder_lacks_is_named(
    small: TinyStack, packages: Path, inside
) -> None:
    inside(small)
    (packages / "tblib").rename(packages / "other")
    done = invoke("upstream-tests", "v3.0", "--offline", "--packages", packages)
    assert done.exit_code == 2
    assert "not there: tblib\n" in done.stderr and str(packages) in done.stderr


def test_a_step_whose_modules_no_test_names(
    small: TinyStack, packages: Path, inside
) -> None:
    inside(small)
    builds = list(small.cache.builds.glob("*"))
    to = packages / "run"
    done = invoke(
        *("upstream-tests", "v3.0", "raise-other", "--offline"),
        *("--packages", packages, "--to", to),
    )
    assert done.exit_code == 2
    assert "no file of vLLM's tests names what the step changes" in done.stderr
    assert "it changes vllm.other" in done.stderr
    assert "xpustack check v3.0 raise-other" in done.stderr
    assert list(small.cache.builds.glob("*")) == builds and not to.exists()


def test_a_prepared_folder_says_what_is_next(
    small: TinyStack, tmp_path: Path, inside
) -> None:
    """Another machine may have the packages."""
    inside(small)
    words = ("upstream-tests", "v3.0", "--offline", "--to", tmp_path / "run")
    done = invoke(*words, "--prepare")
    assert (done.exit_code, done.stdout) == (
        0,
        f"next: D={tmp_path}/run sh commands.sh where the platform is\n",
    )
    assert invoke(*words, "--prepare", "--read").exit_code == 2
    done = invoke(*words, "--read")
    assert done.exit_code == 2 and "commands.sh" in done.stderr
