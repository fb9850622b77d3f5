# SPDX-License-Identifier: Apache-2.0
"""Steps exported onto a contributor's clone: each alone where it can stand alone."""

import shlex
import subprocess
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from clones import STEPS, TABLE, ClonedStack
from exports import ME, written
from fake_stack import git
from tiny_stack import VALUE

from stack.base import releases
from stack.base.clone import opened
from stack.base.store import Store
from stack.checks.run import run
from stack.core.errors import CheckFailed, UsageError
from stack.core.rows import read_rows
from stack.upstream.export import ExportResult
from stack.upstream.form import FIRST_SUBJECT, TEST_HOME

STANDS = {
    "clean": "alone",
    "merges": "alone",
    "there": "upstream",
    "needs": "after merges",
    "needs-by-test": "after clean",
    "renamed": "alone",
    "conflicts": "conflict",
    "there-by-test": "upstream",
}


@pytest.fixture(scope="module")
def checked(cloned: ClonedStack) -> ClonedStack:
    """The stack with all checks of v2.0 green."""
    release = releases.load(cloned.project)["v2.0"]
    done = run(cloned.project, cloned.cache, [release])
    assert not done.failed, done.results
    return cloned


@pytest.fixture
def place(checked: ClonedStack, tmp_path: Path) -> Path:
    """A contributor's clone, with work that is not committed and a branch of theirs."""
    place = checked.clone(str(tmp_path / "clone"))
    git(place, "branch", "mine")
    (place / TABLE).write_text("mine\n")
    hook = place / ".git/hooks/reference-transaction"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    return place


def onto(stack: ClonedStack, place: Path, out: Path, **options) -> ExportResult:
    with opened(Store(stack.cache), f"{place}:main") as clone:
        release = releases.load(stack.project)["v2.0"]
        return written(stack, out, release, clone=clone, **options)


def untouched(place: Path) -> dict[str, bytes]:
    """A clone's files without objects and our own branches."""
    ours = ("objects/", "refs/heads/xpu-dsv4", "logs/refs/heads/xpu-dsv4")
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
        if not str(path.relative_to(place)).removeprefix(".git/").startswith(ours)
    }


def test_each_step_gets_a_branch_with_what_it_needs(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    before, out = untouched(place), tmp_path / "out"
    done = onto(checked, place, out)
    rows = read_rows(out / "requests.csv")
    assert {row["step"]: row["stands"] for row in rows} == STANDS
    why = {row["step"]: row["why"] for row in rows}
    assert why["there"].startswith("nothing is left")
    assert why["there-by-test"] == "its test passes without it"
    assert why["conflicts"] == f"in {TABLE}"
    assert untouched(place) == before
    assert not (tmp_path / "hook-ran").exists()
    branches = git(place, "branch", "--format=%(refname:short)").split()
    assert [name for name in branches if "/" in name] == sorted(done.state.branches)
    subjects = git(place, "log", "--format=%s", "main..xpu-dsv4/needs").splitlines()
    assert subjects == ["[XPU] Do needs", "[XPU] Do merges", FIRST_SUBJECT]
    named = git(place, "diff", "--name-only", "main", "xpu-dsv4/renamed").split()
    assert "vllm/new_name.py" in named and "vllm/old_name.py" not in named
    assert not (out / "repository").exists()
    cover = (out / "cover.md").read_text()
    assert "stand alone 3 of 3 pairs merge with each other.\n\n## Order" in cover
    assert "### Ready\n\n- `clean`\n- `merges`\n- `renamed`\n" in cover
    assert "- `needs`: after `merges`" in cover
    assert "- `there-by-test`: its test passes without it" in cover
    assert f"- `conflicts`: conflict: in {TABLE}" in cover
    text = (out / "pull-requests/needs-by-test.md").read_text()
    assert "1 passed, 1 of them failed before" in text
    assert not (out / "pull-requests/conflicts.md").exists()
    push_and_mail(checked, place, out, tmp_path)
    assert not onto(checked, place, out).changed


def push_and_mail(stack: ClonedStack, place: Path, out: Path, tmp_path: Path) -> None:
    """What is pushed, and what the mails give on a fresh clone, are the same trees."""
    git(tmp_path, "init", "-q", "--bare", "forge")
    git(place, "push", "-q", str(tmp_path / "forge"), "refs/heads/xpu-dsv4/*")
    fresh = stack.clone(str(tmp_path / "fresh"))
    [first] = (out / "mails/tests").iterdir()
    for mails in sorted((out / "mails").iterdir()):
        git(fresh, "checkout", "-q", "--detach", "origin/main")
        names = dict.fromkeys([str(first), *map(str, sorted(mails.iterdir()))])
        git(fresh, "am", "-q", "--keep-non-patch", "--keep-cr", *names)
        pushed = f"xpu-dsv4/{mails.name}^{{tree}}"
        tree = git(tmp_path / "forge", "rev-parse", pushed)
        assert git(fresh, "rev-parse", "HEAD^{tree}") == tree, mails.name


def test_a_bundle_leaves_the_clone_as_it_is(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    out = tmp_path / "out"
    done = onto(checked, place, out, slugs=("clean", "needs"), bundle=True)
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert after == before
    assert set(done.state.branches) == {
        "xpu-dsv4/clean",
        "xpu-dsv4/needs",
        "xpu-dsv4/tests",
    }
    fresh = checked.clone(str(tmp_path / "fresh"), "--depth=1")
    git(fresh, "fetch", "-q", str(out / "branches.bundle"), "refs/heads/*:refs/heads/*")
    for branch, commit in done.state.branches.items():
        assert git(fresh, "rev-parse", branch).strip() == commit
    shown = git(fresh, "show", "--format=", "--name-only", "xpu-dsv4/clean")
    assert TABLE in shown and f"{TEST_HOME}/test_clean.py" in shown


@pytest.mark.parametrize("kind", ["detached", "bare", "linked", "shallow"])
def test_every_kind_of_clone_gets_the_same_branches(
    checked: ClonedStack, tmp_path: Path, kind: str
) -> None:
    options = {"bare": ["--bare"], "shallow": ["--depth=1"]}.get(kind, [])
    place = named = checked.clone(str(tmp_path / "clone"), *options)
    if kind == "detached":
        git(place, "checkout", "-q", "--detach")
    elif kind == "linked":
        named = tmp_path / "linked"
        git(place, "worktree", "add", "-q", str(named), "-b", "other")
    before = git(place, "for-each-ref"), git(named, "rev-parse", "HEAD")
    done = onto(checked, named, tmp_path / "out", slugs=("clean", "needs"))
    for branch, commit in done.state.branches.items():
        assert git(place, "rev-parse", branch).strip() == commit
    subjects = git(place, "log", "--format=%s", "main..xpu-dsv4/needs").splitlines()
    assert subjects == ["[XPU] Do needs", "[XPU] Do merges", FIRST_SUBJECT]
    git(place, "fsck", "--connectivity-only")
    refs = git(place, "for-each-ref").splitlines(keepends=True)
    others = "".join(line for line in refs if "\trefs/heads/xpu-dsv4/" not in line)
    assert (others, git(named, "rev-parse", "HEAD")) == before


@pytest.mark.parametrize("kind", ["branch of theirs", "checked out"])
def test_a_branch_that_would_be_lost_is_kept(
    checked: ClonedStack, place: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    if kind == "branch of theirs":
        git(place, "branch", "xpu-dsv4/clean", "main~1")
        match = "that is not from this export"
    else:
        onto(checked, place, out, slugs=("clean",))
        git(place, "checkout", "-q", "--force", "xpu-dsv4/clean")
        match = "is checked out"
    before = git(place, "for-each-ref")
    with pytest.raises(UsageError, match=match) as caught:
        onto(checked, place, out, slugs=("clean",), assistant="another tool")
    assert "--bundle" in (caught.value.hint or "")
    assert git(place, "for-each-ref") == before


def test_a_branch_in_the_place_of_ours_is_said_before_a_test_runs(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    git(place, "branch", "xpu-dsv4", "main~1")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    told: list[str] = []
    stack = copy(checked)
    stack.cache = replace(checked.cache, progress=told.append)
    with pytest.raises(UsageError, match="has a branch xpu-dsv4, so git") as caught:
        onto(stack, place, tmp_path / "out", slugs=("clean",))
    assert not any("test" in message for message in told), told
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert after == before
    rename = (caught.value.hint or "").partition(", or")[0]
    subprocess.run(shlex.split(rename), check=True)
    assert onto(checked, place, tmp_path / "out", slugs=("clean",)).changed


def test_a_series_that_is_named_is_not_put_onto_an_older_commit(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    words = ["export", "v2.0", "clean", "--offline", "--author", str(ME)]
    words += ["--to", str(tmp_path / "out"), "--onto", f"{place}:v1.0"]
    done = checked.run(*words)
    assert done.returncode == 2, done.stderr
    assert "v1.0 is older than v2.0" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_step_that_serving_needs_is_in_the_branch(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    notes = checked.write("patches/renamed/request.md", "After: clean\n")
    try:
        done = onto(checked, place, tmp_path / "out", slugs=("renamed",))
    finally:
        notes.unlink()
    assert [request.stands for request in done.requests] == ["after clean"]
    subjects = git(place, "log", "--format=%s", "main..xpu-dsv4/renamed").splitlines()
    assert subjects == ["[XPU] Do renamed", "[XPU] Do clean", FIRST_SUBJECT]


def test_the_first_request_goes_when_the_base_has_it(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    onto(checked, place, out, slugs=("clean",))
    git(place, "update-ref", "refs/heads/main", "xpu-dsv4/tests")
    done = onto(checked, place, out, slugs=("clean",))
    assert set(done.state.branches) == {"xpu-dsv4/clean"}
    texts = [path.name for path in (out / "pull-requests").iterdir()]
    assert texts == ["clean.md"]
    assert FIRST_SUBJECT not in (out / "pull-requests/clean.md").read_text()
    cover = (out / "cover.md").read_text()
    assert "mails/tests" not in cover and "Below each branch" not in cover
    assert "asks for an RFC first. Once a request is merged" in cover


def test_what_was_found_before_is_taken_where_it_still_holds(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    """`needs` does not merge onto the base alone."""
    rows = checked.write(
        "docs/data/requests.csv",
        "release,step,stands,test\n"
        'v2.0,needs,alone,"1 tests, 1 fail before"\n'
        'v2.0,renamed,"after clean, merges","1 tests, 1 fail before"\n',
    )
    try:
        done = onto(checked, place, tmp_path / "out", slugs=("renamed", "needs"))
    finally:
        rows.unlink()
    stands = {request.slug: request.stands for request in done.requests}
    assert stands == {"needs": "after merges", "renamed": "after clean, merges"}


def test_a_base_that_does_not_import_is_said_before_a_test_runs(
    checked: ClonedStack, place: Path, tmp_path: Path
) -> None:
    (place / VALUE).write_text("import nowhere\n")
    git(place, "commit", "-q", "--all", "-m", "Need what is not there")
    told: list[str] = []
    stack = copy(checked)
    stack.cache = replace(checked.cache, progress=told.append)
    with pytest.raises(CheckFailed, match="does not import") as caught:
        onto(stack, place, tmp_path / "out", slugs=("clean",))
    assert "No module named 'nowhere'" in caught.value.detail[-1]
    assert not any("testing" in message for message in told), told


def test_every_kind_of_step_is_there() -> None:
    assert list(STANDS) == list(STEPS)


def test_the_command(checked: ClonedStack, place: Path, tmp_path: Path) -> None:
    words = ["export", "v2.0", "clean", "--offline", "--author", str(ME)]
    words += ["--to", str(tmp_path / "out"), "--onto", f"{place}:main"]
    done = checked.run(*words)
    assert done.returncode == 0, done.stderr
    assert "clean" in done.stdout and "alone" in done.stdout
    assert f"next: git -C {place} log -p xpu-dsv4/clean" in done.stdout
    assert git(place, "log", "-1", "--format=%an", "xpu-dsv4/clean") == "Me Myself\n"
    before, rows = git(place, "for-each-ref"), tmp_path / "rows.csv"
    rows.write_text(
        "release,step,stands,test\n"
        'v1.0,merges,alone,"1 tests, 1 fail before"\n'
        "v2.0,clean,unknown,\n"
        'v2.0,merges,after clean,"1 tests, 1 fail before"\n'
        'v2.0,gone,alone,"1 tests, 1 fail before"\n'
    )
    words = ["export", "v2.0", "clean", "needs", "needs-by-test"]
    words += ["--onto", f"{place}:main"]
    done = checked.run(*words, "--rows", str(rows), "--offline")
    assert done.returncode == 0, done.stderr
    green, heads = "1 tests, 1 fail before", ("release", "step", "stands", "test")
    assert [tuple(row[head] for head in heads) for row in read_rows(rows)] == [
        ("v1.0", "merges", "alone", green),
        ("v2.0", "clean", "alone", green),
        ("v2.0", "merges", "after clean", green),
        ("v2.0", "needs", "after clean, merges", green),
        ("v2.0", "needs-by-test", "after clean", green),
    ]
    assert git(place, "for-each-ref") == before
    for wrong in (["export"], ["export", "v2.0", "--bundle"]):
        assert checked.run(*wrong).returncode == UsageError.exit_code
