# SPDX-License-Identifier: Apache-2.0
"""A request's own tests, in the files that vLLM has."""

import difflib
from pathlib import Path

import pytest
from exports import written
from fake_stack import git
from tiny_stack import HEADER, PROVES, TWO, VALUE, TinyStack

from stack.base import releases
from stack.checks.run import run
from stack.core.errors import CheckFailed, SeriesError, UsageError
from stack.upstream import proofs
from stack.upstream.export import ExportResult
from stack.upstream.form import TEST_HOME
from stack.upstream.proofs import judged
from stack.upstream.texts import Template, describe
from stack.upstream.vllm_tests import LATE, Compared, FileRun

OLD = "from vllm import value\n\n\ndef test_old():\n    assert value.OLD == 1\n"
NEW = "\n\ndef test_value():\n    assert value.VALUE == 2\n"
BASE = {
    "vllm/config.py": HEADER,
    "vllm/model_executor/models/registry.py": HEADER,
    "tests/test_old.py": HEADER + OLD,
    "docs/value.md": "The value is 1.\n",
}
PAGE = BASE["docs/value.md"].replace("1", "2")


def diff_of(path: str, text: str) -> str:
    """The diff that gives a file of `BASE` another text."""
    lines = (BASE.get(path, "").splitlines(True), text.splitlines(True))
    body = difflib.unified_diff(*lines, f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(body)


DIFF = diff_of("docs/value.md", PAGE) + diff_of("tests/test_old.py", HEADER + OLD + NEW)
NOTES = "patches/raise-value/request.md"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """Release v3.0, whose tests name what its first step changes, checked."""
    stack = TinyStack(tmp_path_factory.mktemp("asked"))
    stack.publish("3.0", BASE)
    stack.write("tests/steps/test_value.py", HEADER + PROVES)
    stack.add("raise-value", {VALUE: TWO}, "v3.0")
    three = {VALUE: TWO.replace("VALUE = 2", "VALUE = 3")}
    proves = PROVES.replace("== 2", "== 3")
    stack.write("tests/steps/test_three.py", HEADER + proves)
    stack.add("raise-again", three, "v3.0", "tests/steps/test_three.py", "2 == 3")
    done = run(stack.project, stack.cache, [releases.load(stack.project)["v3.0"]])
    assert not done.failed, done.results
    return stack


def asked(
    stack: TinyStack, packages: Path | None, *slugs: str, diff: str = DIFF, **options
) -> ExportResult:
    """An export where the first step's request brings `diff`."""
    stack.write("patches/raise-value/request.diff", diff)
    release = releases.load(stack.project)["v3.0"]
    return written(stack, "out", release, slugs=slugs, packages=packages, **options)


@pytest.mark.parametrize(
    ("title", "where"),
    [
        ("[XPU] Raise it", "CPU, the XPU platform emulated"),
        ("[Core] Raise it", "vLLM's CPU platform"),
    ],
)
def test_they_are_shown_on_the_requests_platform(
    stack: TinyStack, packages: Path, title: str, where: str
) -> None:
    stack.write(NOTES, f"Title: {title}\n")
    done = asked(stack, packages, "raise-value", bisect=True)
    text = (done.directory / "pull-requests/raise-value.md").read_text()
    claims = describe(done.requests[0], Template(("Claims",)), "v9.9")
    assert "- Tests new or changed in `tests/test_old.py`: 1 of 1 red wit" in claims
    assert f"| new or changed in `tests/test_old.py` | {where} | 1 passed, 1" in text
    assert "| `test_value` | assert 1 == 2 | passes |" in text
    assert ("On an XPU:" in text) == ("[XPU]" in title)
    assert list(done.state.branches) == ["xpu-dsv4/raise-value"]
    assert [mail.name for mail in (done.directory / "mails").iterdir()] == [
        "raise-value"
    ]
    shown = ("show", "--name-only", "--format=", "HEAD")
    changed = git(done.directory / "repository", *shown).split()
    assert changed == ["docs/value.md", "tests/test_old.py", VALUE]


def test_only_other_steps_stand_on_the_first_commit(
    stack: TinyStack, packages: Path
) -> None:
    done = asked(stack, packages)
    work = done.directory / "repository"
    subjects = ("log", "--format=%s", "base..xpu-dsv4/raise-again")
    assert len(git(work, *subjects).splitlines()) == 3
    files = git(work, "ls-tree", "-r", "--name-only", "xpu-dsv4/raise-again").split()
    assert f"{TEST_HOME}/test_three.py" in files
    assert f"{TEST_HOME}/test_value.py" not in files
    assert git(work, "show", "xpu-dsv4/raise-again:tests/test_old.py").endswith(NEW)
    [mail] = (done.directory / "mails/raise-value").iterdir()
    assert mail.name.startswith("0001")


def test_a_request_of_two_steps_has_them_in_one(
    stack: TinyStack, packages: Path
) -> None:
    stack.write("patches/raise-again/request.md", "With: raise-value\n")
    done = asked(stack, packages)
    [request] = done.requests
    assert not request.on_first and len(request.shown) == 1
    shown = ("show", "--name-only", "--format=", "HEAD")
    assert git(done.directory / "repository", *shown).split() == [VALUE]


def test_what_is_shown_is_kept(stack: TinyStack, packages: Path) -> None:
    plugin = packages / "pytest_asyncio/plugin.py"
    asked(stack, packages, "raise-value")
    runs: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "run", lambda *args, **options: runs.append("run"))
        assert not asked(stack, packages, "raise-value").changed
    assert not runs
    with pytest.raises(UsageError, match="vLLM's tests import") as caught:
        asked(stack, None, "raise-value")
    assert (caught.value.hint or "").endswith("xpustack export v3.0 --packages DIR")
    plugin.write_text("raise ImportError\n")
    with pytest.raises(CheckFailed, match="do not prove"):
        asked(stack, packages, "raise-value")


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (NEW.replace("== 2", "== 1"), "test_value: passed before, failed after"),
        (NEW.replace("== 2", "== 3"), "test_value: failed before, failed after"),
        (NEW.replace("== 2", "> 0"), "no test that it adds or changes is red before"),
        (NEW + "\n\nassert value.VALUE == 1\n", "AssertionError"),
        ("\n# More.\n", "no test that it adds or changes is red before"),
    ],
    ids=["wrong", "red", "always", "not collected", "none"],
)
def test_tests_that_do_not_prove_the_step_are_refused(
    stack: TinyStack, packages: Path, added: str, problem: str
) -> None:
    diff = diff_of("tests/test_old.py", HEADER + OLD + added)
    with pytest.raises(CheckFailed, match="do not prove its step") as caught:
        asked(stack, packages, "raise-value", diff=diff)
    assert caught.value.step == "raise-value"
    assert problem in "\n".join(caught.value.detail)
    assert not (stack.root / "out").exists()


@pytest.mark.parametrize(
    ("diff", "problem"),
    [
        (DIFF.replace("value.OLD == 1", "value.OLD == 0"), "hunk 1 of 1"),
        (DIFF.replace("tests/test_old", "tests/test_gone"), "no such file to patch"),
        (DIFF.replace("docs/value.md", "vllm/value.py"), "neither a test nor a page"),
        (diff_of("docs/value.md", PAGE), "no test module"),
        (DIFF.replace("@@ -4,3", "@@ -4,2"), "hunk"),
        (
            "diff --git a/tests/test_b.py b/tests/test_b.py\nnew file mode 100644\n"
            "--- /dev/null\n+++ b/tests/test_b.py\n@@ -0,0 +1 @@\n+A = 1\n",
            "vLLM has no tests/test_b.py",
        ),
    ],
    ids=["other lines", "no file", "code", "no test", "malformed", "new file"],
)
def test_a_diff_that_is_none_of_the_tests_is_refused(
    stack: TinyStack, packages: Path, diff: str, problem: str
) -> None:
    with pytest.raises(SeriesError) as caught:
        asked(stack, packages, "raise-value", diff=diff)
    error = caught.value
    assert problem in error.message
    assert (error.step, error.exit_code) == ("raise-value", 4)
    assert "patches/raise-value/request.diff" in (error.path or "") and error.hint


def test_a_file_that_was_killed_proves_nothing() -> None:
    both = FileRun({"a": "failed"}, "", 1), FileRun({"a": "passed"}, "late", 1)
    assert judged([Compared("f", *both)]) == ["f: late"]
    before = FileRun({}, LATE, 1), FileRun({"a": "passed"}, "", 1)
    assert judged([Compared("f", *before)]) == [f"f, before: {LATE}"]
