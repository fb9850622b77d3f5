# SPDX-License-Identifier: Apache-2.0
"""A series as pull requests: what is written, and what is refused."""

import shutil
import subprocess
from pathlib import Path

import pytest
from exports import ME, files, written
from fake_stack import git
from tiny_stack import HEADER, VALUE, TinyStack

from stack.base import releases
from stack.checks.checker import Checker
from stack.checks.run import run
from stack.core.checkout import Checkout
from stack.core.errors import (
    CheckFailed,
    EnvironmentProblem,
    SeriesError,
    UsageError,
)
from stack.upstream.export import ExportResult
from stack.upstream.folder import known_needs
from stack.upstream.form import TEST_HOME
from stack.upstream.trees import Person

FIRST_MAIL = "0001-Test-XPU-DSv4-Add-what-DeepSeek-V4-s-tests-on-XPU-sh.patch"


def test_an_export_has_branches_mails_and_texts(exported: ExportResult) -> None:
    place = exported.directory
    assert list(files(place)) == [
        "cover.md",
        "export.json",
        "mails/raise-again/0001-XPU-Do-raise-value.patch",
        "mails/raise-again/0002-XPU-Do-raise-again.patch",
        "mails/raise-value/0001-XPU-Do-raise-value.patch",
        f"mails/tests/{FIRST_MAIL}",
        "pull-requests/raise-again.md",
        "pull-requests/raise-value.md",
        "pull-requests/tests.md",
        "requests.csv",
    ]
    work = place / "repository"
    assert git(work, "branch", "--format=%(refname:short)").split() == [
        "xpu-dsv4/raise-again",
        "xpu-dsv4/raise-value",
        "xpu-dsv4/tests",
    ]
    log = git(work, "log", "--format=%an <%ae>|%cn|%B", "base..HEAD")
    assert log.count("Me Myself <me@localhost>|Me Myself|") == 3
    assert log.count("Signed-off-by: Me Myself <me@localhost>\n") == 3
    assert log.count("Co-authored-by: ") == 3
    for own in ("Upstream-Status", "Removal", "Fails-before", "Step:", "tests/steps"):
        assert own not in log
    assert git(work, "status", "--porcelain") == ""


def test_tests_land_as_a_package_beside_what_they_import(
    exported: ExportResult,
) -> None:
    home = exported.directory / "repository" / TEST_HOME
    assert sorted(path.name for path in home.iterdir()) == [
        "__init__.py",
        "conftest.py",
        "numbers_beside.py",
        "test_three.py",
        "test_value.py",
    ]
    text = (home / "test_three.py").read_text()
    assert "from . import numbers_beside as beside\n" in text
    assert "unchanged" not in text and "import pytest" not in text
    assert text.startswith(HEADER + "# SPDX-FileCopyrightText")
    shown = ("show", "--name-only", "--format=")
    first = git(home, *shown, "xpu-dsv4/tests").split()
    shared = {"__init__.py", "conftest.py", "numbers_beside.py"}
    assert {name.rpartition("/")[2] for name in first if TEST_HOME in name} == shared
    second = git(home, *shown, "xpu-dsv4/raise-value").split()
    assert sorted(second) == [f"{TEST_HOME}/test_value.py", VALUE]


def test_a_step_that_stays_here_is_exported_by_name_with_its_own_helpers(
    stack: TinyStack,
) -> None:
    patch = stack.patch("raise-again")
    kept = patch.read_text().replace("Status: Pending", "Status: Inappropriate [ours]")
    patch.write_text(kept)
    run(stack.project, stack.cache, [stack.release])
    sent = {request.slug for request in written(stack, "sent").requests}
    assert sent and "raise-again" not in sent
    slugs = [tree.slug for tree in stack.trees() if tree.slug]
    folder = written(stack, slugs=slugs).directory
    assert "### Not for upstream" in (folder / "cover.md").read_text()
    home = folder / "repository"
    shown = ("show", "--name-only", "--format=")
    helper = f"{TEST_HOME}/numbers_beside.py"
    assert helper not in git(home, *shown, "xpu-dsv4/tests").split()
    assert helper in git(home, *shown, "xpu-dsv4/raise-again").split()


def test_a_release_whose_steps_all_stay_here_has_no_requests(stack: TinyStack) -> None:
    for slug in (tree.slug for tree in stack.trees() if tree.slug):
        patch = stack.patch(slug)
        patch.write_text(patch.read_text().replace("Pending", "Inappropriate [ours]"))
    with pytest.raises(UsageError, match="all steps of the release stay in this stack"):
        written(stack)


def test_mails_apply_to_a_clean_archive_with_plain_git_am(
    stack: TinyStack, exported: ExportResult
) -> None:
    clean = stack.root / "clean"
    shutil.copytree(exported.directory / "repository", clean)
    git(clean, "checkout", "-q", "base")
    shutil.rmtree(clean / ".git")
    git(clean, "init", "-q")
    git(clean, "add", "-A", "-f")
    git(clean, "commit", "-q", "-m", "vLLM")
    mails = [exported.directory / "mails/tests" / FIRST_MAIL]
    mails += sorted((exported.directory / "mails/raise-again").iterdir())
    git(clean, "am", "-q", *map(str, mails))
    trees = "log", "-3", "--format=%T"
    ours = exported.directory / "repository"
    assert git(clean, *trees) == git(ours, *trees)
    assert git(clean, "log", "-1", "--format=%s") == "Do raise-again\n"
    git(clean, "reset", "-q", "--hard", "HEAD~3")
    git(clean, "am", "-q", "--keep-non-patch", "--keep-cr", *map(str, mails))
    messages = "log", "-3", "--format=%an%B"
    assert git(clean, *messages) == git(ours, *messages)


def test_rows_of_green_tests_of_the_release_are_known(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "release,step,stands,test\n"
        'v1.0,green,alone,"1 tests, 1 fail before"\n'
        'v2.0,green,"after one, two","3 tests, 2 fail before, 1 on a CPU too"\n'
        "v2.0,red,after one,merges; red on this set\n"
        "v2.0,taken,alone,\n"
    )
    assert known_needs(rows, "v2.0") == {"green": ("one", "two")}
    assert known_needs(tmp_path / "absent.csv", "v2.0") == {}


def test_rows_with_other_columns_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("step,stands,test\ngreen,alone,\n")
    with pytest.raises(UsageError, match="release, stands, step, test") as caught:
        known_needs(rows, "v2.0")
    assert caught.value.path == str(rows)


def test_what_is_no_text_or_a_folder_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "rows.csv"
    other.write_bytes(b"\xff\xfe\n")
    for place in (tmp_path, other):
        with pytest.raises(UsageError, match="release, stands, step, test") as caught:
            known_needs(place, "v2.0")
        assert caught.value.path == str(place)


def test_exporting_again_changes_nothing_or_says_what_changed(
    stack: TinyStack, exported: ExportResult
) -> None:
    before = (exported.directory / "export.json").read_bytes()
    again = written(stack)
    assert not again.changed
    assert (exported.directory / "export.json").read_bytes() == before
    patch = stack.patch("raise-again")
    patch.write_text(patch.read_text().replace("\nWhy.\n", "\nWhy, and how.\n"))
    run(stack.project, stack.cache, [stack.release])
    again = written(stack)
    assert (again.changed, again.state.number) == (True, 2)
    text = (again.directory / "range-diff.txt").read_text()
    assert "-    Why." in text and "+    Why, and how." in text
    assert text.startswith("xpu-dsv4/raise-again\n1:")
    refs = git(again.directory / "repository", "for-each-ref", "refs/exports")
    assert "refs/exports/1/xpu-dsv4/raise-again" in refs


def test_each_commit_passes_its_test_alone(stack: TinyStack) -> None:
    done = written(stack, bisect=True)
    results = [request.alone for request in done.requests]
    assert [result and result.summary for result in results] == [
        "1 tests passed",
        "2 tests passed",
    ]
    text = (done.directory / "pull-requests/raise-value.md").read_text()
    assert "its test run from `tests/` | as above | 1 tests passed" in text


def test_an_unchecked_series_is_refused(stack: TinyStack) -> None:
    stack.write("tests/steps/numbers_beside.py", HEADER + "THREE = 1 + 2\n")
    with pytest.raises(CheckFailed, match="needs green checks") as caught:
        written(stack)
    assert caught.value.detail == ("raise-again: test",)
    assert caught.value.hint == "xpustack check v1.0"
    assert not (stack.root / "out").exists()
    first, second = Checker(stack.project, stack.cache).proofs(stack.series())
    assert (first.missing, second.missing) == ((), ("test",))
    assert first.test is not None


def test_a_series_that_changed_since_its_record_is_refused(stack: TinyStack) -> None:
    done = stack.run("stamp", "--all")
    assert done.returncode == 0, done.stderr
    patch = stack.patch("raise-again")
    patch.write_text(patch.read_text().replace("\nWhy.\n", "\nWhy, or not.\n"))
    with pytest.raises(SeriesError, match="changed since revision 1"):
        written(stack)
    assert not (stack.root / "out").exists()


def test_a_subject_without_a_tag_is_refused(stack: TinyStack) -> None:
    patch = stack.patch("raise-again")
    patch.write_text(patch.read_text().replace("[PATCH] [XPU] Do", "[PATCH] Do"))
    run(stack.project, stack.cache, [stack.release])
    with pytest.raises(SeriesError, match="does not start with a tag") as caught:
        written(stack)
    assert caught.value.step == "raise-again"


def test_the_base_hooks_judge_what_is_exported(stack: TinyStack) -> None:
    stack.write("tests/steps/numbers_beside.py", "THREE = 3\n")
    run(stack.project, stack.cache, [stack.release])
    with pytest.raises(CheckFailed, match="the base's own hooks") as caught:
        written(stack, slugs=("raise-again",))
    assert caught.value.step == "raise-again"
    assert any("numbers_beside.py" in line for line in caught.value.detail)


@pytest.mark.parametrize("kind", ["text", "new file", "work tree", "branch"])
def test_a_folder_that_a_person_changed_is_kept(
    stack: TinyStack, exported: ExportResult, kind: str
) -> None:
    place = exported.directory
    if kind == "text":
        (place / "cover.md").write_text("mine\n")
    elif kind == "new file":
        (place / "mails/mine").touch()
    elif kind == "work tree":
        (place / "repository" / VALUE).write_text("mine\n")
    else:
        git(place / "repository", "branch", "mine")
    with pytest.raises(UsageError, match="would lose") as caught:
        written(stack)
    assert len(caught.value.detail) == 1


def test_a_foreign_folder_and_another_release_are_refused(
    stack: TinyStack, exported: ExportResult
) -> None:
    foreign = stack.root / "foreign"
    foreign.mkdir()
    (foreign / "mine").touch()
    with pytest.raises(UsageError, match="not made by xpustack export"):
        written(stack, "foreign")
    other = releases.load(stack.project)["v2.0"]
    with pytest.raises(UsageError, match=r"holds an export of v1\.0"):
        written(stack, exported.directory, other)
    with pytest.raises(UsageError, match="has no steps"):
        written(stack, "new", other)


def test_an_interrupt_or_a_full_disk_leaves_the_last_export(
    stack: TinyStack, exported: ExportResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict.fromkeys(files(exported.directory))
    patch = stack.patch("raise-again")
    patch.write_text(patch.read_text().replace("\nWhy.\n", "\nWhy, or not.\n"))
    run(stack.project, stack.cache, [stack.release])
    for failure in (KeyboardInterrupt(), OSError(28, "No space left on device")):

        def fail(*_: object, failure: BaseException = failure) -> None:
            raise failure

        monkeypatch.setattr(Checkout, "format_patches", fail)
        with pytest.raises((KeyboardInterrupt, EnvironmentProblem)):
            written(stack)
    assert dict.fromkeys(files(exported.directory)) == before
    assert not list(stack.root.glob(".xpustack-*"))
    monkeypatch.undo()
    assert written(stack).state.number == 2


@pytest.mark.parametrize("spare", [0, 32, 64])
def test_a_full_disk_is_named(stack: TinyStack, small_disk: Path, spare: int) -> None:
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(free - (spare << 10)))
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        written(stack, small_disk / "out")
    assert not (small_disk / "out").exists()


def test_who_exports(stack: TinyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOBAL", "SYSTEM"):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", "/dev/null")
    with pytest.raises(UsageError, match=r"git has no user\.name") as caught:
        Person.find(stack.project)
    assert "git config user.name" in (caught.value.hint or "")
    subprocess.run(["git", "init", "-q", str(stack.project.root)], check=True)
    for key, value in (("user.name", "Ada B"), ("user.email", "ada@localhost")):
        git(stack.project.root, "config", key, value)
    assert Person.find(stack.project) == Person("Ada B", "ada@localhost")
    assert Person.find(stack.project, "C D <c@d>") == Person("C D", "c@d")
    for wrong in ("C D", "<c@d>", "C D <c>", "C\nD <c@d>"):
        with pytest.raises(UsageError, match="is not `Name <address>`"):
            Person.find(stack.project, wrong)


def test_the_command(stack: TinyStack) -> None:
    out = str(stack.root / "there")
    words = ["export", "v1.0", "--offline", "--to", out, "--author", str(ME)]
    done = stack.run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"export 1 written to {out}\n")
    assert stack.run(*words).stdout.endswith(f"export 1 unchanged in {out}\n")
    done = stack.run("export", "v1.1", "--author", str(ME))
    assert done.returncode == 2 and "did you mean v1.0?" in done.stderr
