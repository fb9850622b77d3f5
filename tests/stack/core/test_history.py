# SPDX-License-Identifier: Apache-2.0
"""What the project's own git says, whatever the user's settings and the caller are."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stack.core import history
from stack.core.git import DATE, Git
from stack.core.project import Project

WRITTEN = "1600000000 +0000"
STEP = "patches/a-step/v1.0.patch"


def git(folder: Path, *words: str) -> str:
    """Git as a person calls it: with no variable that names another repository."""
    environment = {
        name: value for name, value in os.environ.items() if name[:4] != "GIT_"
    }
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.stdout.strip()


def repository(root: Path, file: str, *options: str) -> Path:
    """A repository with one commit, of one file."""
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("text\n")
    git(root, "init", "--quiet")
    git(root, "config", "user.name", f"the owner of {root.name}")
    git(root, "config", "user.email", "a@example.org")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", file, "--date", WRITTEN, *options)
    return root


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without settings, who is in no repository."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in [name for name in os.environ if name.startswith(("GIT_", "XDG_"))]:
        monkeypatch.delenv(name)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(repository(tmp_path / "own", STEP))


def answers(project: Project, place: Path) -> dict[str, object]:
    """Everything that is asked about a project with one commit."""
    place.mkdir()
    known = Git(project.root / ".git", work_tree=project.root)
    commit = history.commit_that_wrote(project, project.root / STEP, "text")
    history.unpack(project, commit, [project.patches], place)
    return {
        "name": history.git_setting(project, "user.name"),
        "date": history.last_change_date(project, project.root / STEP),
        "commit": history.current_commit(project),
        "wrote": commit,
        "tracked": [path for path in (STEP, "new") if known.tracks(Path(path))],
        "unpacked": [str(path.relative_to(place)) for path in place.glob("**/*.patch")],
    }


def right(project: Project) -> dict[str, object]:
    head = git(project.root, "rev-parse", "HEAD")
    return {
        "name": "the owner of own",
        "date": WRITTEN,
        "commit": head[:12],
        "wrote": head,
        "tracked": [STEP],
        "unpacked": [STEP],
    }


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="openssh is not installed")
def test_of_a_signed_commit_whose_signatures_the_user_wants_to_see(
    tmp_path: Path, home: Path
) -> None:
    key = home / "key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True
    )
    settings = {
        "gpg.format": "ssh",
        "user.signingKey": f"{key}.pub",
        "log.showSignature": "true",
    }
    for name, value in settings.items():
        git(home, "config", "--global", name, value)
    project = Project(repository(tmp_path / "own", STEP, "-S"))
    # A repository's own configuration is nearer than the user's.
    git(project.root, "config", "log.showSignature", "true")
    assert "gpgsig" in git(project.root, "cat-file", "commit", "HEAD")
    assert answers(project, tmp_path / "unpacked") == right(project)


def test_a_rename_is_a_change(project: Project) -> None:
    """`log.follow` would look for the change before it."""
    git(project.root, "config", "log.follow", "true")
    git(project.root, "mv", STEP, "patches/renamed.patch")
    git(project.root, "commit", "--quiet", "-m", "rename", "--date", "1700000000 +0000")
    path = project.patches / "renamed.patch"
    wrote = history.commit_that_wrote(project, path, "text")
    assert wrote == git(project.root, "rev-parse", "HEAD")


@pytest.mark.parametrize("directory", [".git", ".git/worktrees/linked"])
def test_in_a_hook_of_another_repository(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    """Git exports these to `rebase --exec` and hooks, in a linked work tree always."""
    other = repository(tmp_path / "other", "unrelated/file")
    git(other, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    monkeypatch.setenv("GIT_DIR", str(other / directory))
    monkeypatch.setenv("GIT_COMMON_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    monkeypatch.setenv("GIT_CONFIG", str(other / ".git/config"))
    assert answers(project, tmp_path / "unpacked") == right(project)


def test_in_a_linked_work_tree(project: Project, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    git(project.root, "worktree", "add", "--quiet", "--detach", str(linked))
    assert answers(Project(linked), tmp_path / "unpacked") == right(project)


def test_a_changed_file_is_said(project: Project) -> None:
    (project.root / STEP).write_text("another text\n")
    assert history.current_commit(project).endswith(", changed")


def test_an_archive_inside_another_repository_has_no_commit(tmp_path: Path) -> None:
    """One that somebody unpacks below a repository of their own, and adds to it."""
    outer = repository(tmp_path / "outer", f"inside/{STEP}")
    project = Project(outer / "inside")
    assert answers(project, tmp_path / "unpacked") == {
        "name": "",
        "date": DATE,
        "commit": "",
        "wrote": "",
        "tracked": [],
        "unpacked": [],
    }


@pytest.mark.parametrize("inside", [True, False])
def test_the_user_is_known_in_an_archive(
    tmp_path: Path, home: Path, inside: bool
) -> None:
    outer = repository(tmp_path / "outer", f"inside/{STEP}")
    git(home, "config", "--global", "user.name", "Ann")
    project = Project(outer / "inside" if inside else tmp_path)
    assert history.git_setting(project, "user.name") == "Ann"


def test_a_setting_of_one_call_counts(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `git -c user.name=Ann rebase --exec`."""
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'user.name'='Ann'")
    assert history.git_setting(project, "user.name") == "Ann"


def test_without_git_there_are_no_answers(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert history.current_commit(project) == ""
