# SPDX-License-Identifier: Apache-2.0
"""A series carried onto a contributor's clone of vLLM, which stays as it is."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from clones import TABLE, ClonedStack
from command_line import invoke
from fake_stack import git

from stack.base.clone import opened
from stack.base.store import Store
from stack.core.errors import StackError, UsageError
from stack.core.git import GitFailed
from stack.refresh import report as refresh_report
from stack.refresh.neighbours import Source, source_of_clone
from stack.refresh.refresh import RefreshReport, refresh

OUTCOMES = {
    "clean": "clean",
    "merges": "merged",
    "there": "upstream",
    "needs": "merged",
    "needs-by-test": "merged",
    "renamed": "merged",
    "conflicts": "conflict",
    "there-by-test": "waits",
}


def onto(stack: ClonedStack, text: Path | str, source: str = "") -> RefreshReport:
    with opened(Store(stack.cache), str(text)) as clone:
        chosen = (
            source or source_of_clone(stack.project, Store(stack.cache), clone).name
        )
        return refresh(stack.project, stack.cache, "", chosen, clone=clone)


def outcomes(done: RefreshReport) -> dict[str, str]:
    return {step.step: step.outcome for step in done.steps}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a clone, those of git included."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_report_judges_each_step_and_names_the_commits(
    cloned: ClonedStack, tmp_path: Path
) -> None:
    place = cloned.clone(str(tmp_path / "clone"))
    done = onto(cloned, place)
    assert outcomes(done) == OUTCOMES
    (clash,) = done.steps[-2].clashes
    (commit,) = clash.commits
    assert commit.endswith(" Give line 12 another value")
    assert commit.split()[0] == git(place, "rev-parse", "--short", "main~3").strip()
    page = refresh_report.markdown(done)
    assert f"# by {commit}" in page
    assert "Write line 3 another way" in page
    assert done.release.name == "v2.0+g" + git(place, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize(
    "kind", ["dirty", "detached", "bare", "linked", "shallow", "forge"]
)
def test_every_kind_of_clone_is_read_and_left_as_it_is(
    cloned: ClonedStack, tmp_path: Path, kind: str
) -> None:
    options = {"bare": ["--bare"], "shallow": ["--depth=1"]}.get(kind, [])
    place = cloned.clone(str(tmp_path / "clone"), *options)
    text = str(place)
    if kind == "dirty":
        (place / TABLE).write_text("mine\n")
        (place / "staged.py").write_text("mine\n")
        git(place, "add", "staged.py")
    elif kind == "detached":
        git(place, "checkout", "-q", "--detach")
    elif kind == "linked":
        git(place, "worktree", "add", "-q", str(tmp_path / "linked"), "-b", "other")
        text = str(tmp_path / "linked")
    elif kind == "forge":
        git(place, "fetch", "-q", "origin", "refs/pull/7/head:refs/pull/7/head")
        text = f"{place}:origin/main"
    hooks = (place if kind == "bare" else place / ".git") / "hooks"
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
        (hooks / name).chmod(0o755)
    before = contents(tmp_path)
    done = onto(cloned, text)
    assert outcomes(done) == OUTCOMES
    assert bool(done.steps[-2].clashes[0].commits) == (kind != "shallow")
    assert contents(tmp_path) == before


def test_a_partial_clone_says_what_it_lacks(
    cloned: ClonedStack, tmp_path: Path
) -> None:
    newer = tmp_path / "upstream"
    shutil.copytree(cloned.upstream, newer)
    (newer / "vllm/newest.py").write_text("NEW = 1\n")
    git(newer, "add", "--all")
    git(newer, "commit", "-q", "-m", "Bring what no cache holds")
    options = ("-q", "--filter=blob:none", "--no-checkout")
    git(tmp_path, "clone", *options, f"file://{newer}", "clone")
    place = tmp_path / "clone"
    before = contents(place)
    with pytest.raises(UsageError, match=r"partial: it lacks \d+ objects") as caught:
        onto(cloned, place)
    assert contents(place) == before
    command = (caught.value.hint or "").partition(" fetches")[0]
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    done = onto(cloned, place)
    assert outcomes(done) == OUTCOMES
    assert "Give line 12" in " ".join(done.steps[-2].clashes[0].commits)


def test_an_older_commit_is_refused_unless_asked_for(
    cloned: ClonedStack, tmp_path: Path
) -> None:
    place = cloned.clone(str(tmp_path / "clone"))
    with pytest.raises(UsageError, match=r"v1\.0 is older than v2\.0") as caught:
        onto(cloned, f"{place}:v1.0")
    assert "vllm.git main" in (caught.value.hint or "")
    assert "export v1.0, refresh --from v1.0" in (caught.value.hint or "")
    assert outcomes(onto(cloned, f"{place}:v1.0", "v2.0"))["clean"] == "clean"
    with opened(Store(cloned.cache), f"{place}:v2.0") as clone:
        source = source_of_clone(cloned.project, Store(cloned.cache), clone)
    assert source == Source("v2.0", "the newest pin")


def test_a_series_that_is_named_is_not_put_onto_an_older_commit(
    cloned: ClonedStack, tmp_path: Path
) -> None:
    store = Store(cloned.cache)
    place = cloned.clone(str(tmp_path / "clone"))
    with opened(store, f"{place}:v1.0") as clone:
        with pytest.raises(UsageError, match=r"v1\.0 is older than v2\.0"):
            source_of_clone(cloned.project, store, clone, "v2.0")
        source = source_of_clone(cloned.project, store, clone, "v1.0")
        assert source == Source("v1.0", "as asked")
    with opened(store, f"{place}:main") as clone:
        assert source_of_clone(cloned.project, store, clone, "v2.0").name == "v2.0"


def test_a_branch_wins_over_a_tag_of_its_name(
    cloned: ClonedStack, tmp_path: Path
) -> None:
    """As `git switch` has it; `git rev-parse` takes the tag."""
    place = cloned.clone(str(tmp_path / "clone"))
    for tag in ("main", "origin/main"):
        git(place, "tag", tag, "v2.0")
    newest = git(place, "rev-parse", "refs/heads/main~0").strip()
    before = git(place, "rev-parse", "refs/heads/main~1").strip()
    found = {"main": newest, "main~1": before, "origin/main": newest}
    found |= {"refs/tags/main": git(place, "rev-parse", "v2.0~0").strip()}
    found |= {"HEAD": newest, newest[:12]: newest}
    for ref, commit in found.items():
        with opened(Store(cloned.cache), f"{place}:{ref}") as clone:
            assert (clone.commit, clone.ref) == (commit, ref)


def test_a_subject_in_another_encoding_is_shown(
    cloned: ClonedStack, tmp_path: Path
) -> None:
    """Old tools write it without saying so."""
    place = cloned.clone(str(tmp_path / "clone"))
    raw = subprocess.run(
        ["git", "-C", str(place), "cat-file", "commit", "main~3"],
        check=True,
        capture_output=True,
    ).stdout
    assert b"Give line 12" in raw
    made = subprocess.run(
        ["git", "-C", str(place), "hash-object", "-t", "commit", "-w", "--stdin"],
        input=raw.replace(b"Give line 12", b"Give l\xefne 12"),
        check=True,
        capture_output=True,
        text=False,
    ).stdout.decode()
    git(place, "branch", "latin", made.strip())
    done = onto(cloned, f"{place}:latin")
    commits = [
        c for step in done.steps for clash in step.clashes for c in clash.commits
    ]
    assert any(c.endswith(" Give l\ufffdne 12 another value") for c in commits)
    assert "Give l\ufffdne 12" in refresh_report.markdown(done)


@pytest.mark.parametrize(
    ("ref", "problem", "hint"),
    [
        (":mains", "no commit mains; did you mean main", "fetch"),
        (":v9.9.9", r"no commit v9\.9\.9", "FETCH_HEAD"),
        (":empty", "is not vLLM", "log -1"),
        ("-away", "no git repository", "git clone"),
        ("-sha256", "SHA-256", "git clone"),
        ("-unborn", "no commit HEAD", "fetch"),
    ],
)
def test_bad_input_is_refused_with_the_next_command(
    cloned: ClonedStack, tmp_path: Path, ref: str, problem: str, hint: str
) -> None:
    place = cloned.clone(str(tmp_path / "clone"))
    empty = git(
        place, "commit-tree", "-m", "none", git(place, "mktree", text="").strip()
    )
    git(place, "branch", "empty", empty.strip())
    git(tmp_path, "init", "-q", "clone-unborn")
    git(tmp_path, "init", "-q", "--object-format=sha256", "clone-sha256")
    with pytest.raises(StackError, match=problem) as caught:
        onto(cloned, f"{place}{ref}")
    assert hint in (caught.value.hint or "")
    assert len(str(caught.value).splitlines()) == 3


def test_no_advice_removes_a_damaged_clone(cloned: ClonedStack, tmp_path: Path) -> None:
    place = cloned.clone(str(tmp_path / "clone"), "--bare")
    with (
        pytest.raises(GitFailed) as caught,
        opened(Store(cloned.cache), str(place)) as clone,
    ):
        for pack in place.glob("objects/pack/*"):
            pack.unlink()
        clone.commits(f"{clone.commit}~1", TABLE)
    assert caught.value.hint == f"git -C {place} fsck"


def test_the_command(
    cloned: ClonedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cloned.clone(str(tmp_path / "clone"))
    monkeypatch.chdir(cloned.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(cloned.cache.root))
    page = tmp_path / "page.md"
    words = ["refresh", "--onto", f"{place}:main", "--report", str(page), "--offline"]
    done = invoke(*words)
    assert done.exit_code == 4, done.output
    assert "from v2.0: the newest pin" in done.output
    assert "Give line 12 another value" in page.read_text()
    for wrong in (["refresh", "v2.0", *words[1:3]], [*words, "--write"]):
        assert invoke(*wrong).exit_code == UsageError.exit_code
