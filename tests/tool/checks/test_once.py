# SPDX-License-Identifier: Apache-2.0
"""What passed on the very files of a checkout is not run again; anything else is."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Result, invoke

Once = Callable[..., Result]
COUNTED = """\
import os, pathlib, sys
log = pathlib.Path(sys.argv[1])
log.write_text(log.read_text() + "ran\\n" if log.exists() else "ran\\n")
pathlib.Path(os.environ["XPUSTACK_SUMMARY"]).write_text("3 passed")
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "releases.toml").write_text("")
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "counted.py").write_text(COUNTED)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


@pytest.fixture
def once(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Once:
    monkeypatch.chdir(checkout)
    # `.ci/run` sets it.
    monkeypatch.delenv("XPUSTACK_AGAIN", raising=False)
    counted = (sys.executable, "counted.py", str(tmp_path / "log"))

    def run(*words: str, index: bool = False, **variables: str) -> Result:
        variables["XPUSTACK_CACHE"] = str(tmp_path / "cache")
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            options = ["--index"] if index else []
            return invoke("once", *options, "--", *(words or counted))

    return run


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "log").read_text().splitlines())


def test_a_pass_is_not_run_again(once: Once, tmp_path: Path) -> None:
    assert once().exit_code == 0
    again = once()
    assert (again.exit_code, runs(tmp_path)) == (0, 1)
    assert "passed on these very files: 3 passed, in" in again.stdout
    assert once(XPUSTACK_AGAIN="1").exit_code == 0
    assert runs(tmp_path) == 2


def test_a_failure_is_run_again_and_its_status_kept(once: Once, tmp_path: Path) -> None:
    assert [once(STATUS="3").exit_code for _ in range(2)] == [3, 3]
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "counted.py").write_text(COUNTED + "\n"),
        lambda folder: (folder / "counted.py").chmod(0o755),
        lambda folder: (folder / "new").write_text("untracked"),
        lambda folder: (folder / ".gitignore").unlink(),
        lambda folder: (folder / "link").symlink_to("counted.py"),
    ],
    ids=["content", "mode", "new", "gone", "link"],
)
def test_a_changed_file_is_seen(
    once: Once, checkout: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    once()
    change(checkout)
    once()
    assert runs(tmp_path) == 2


@pytest.mark.parametrize("index", [False, True])
def test_what_git_tracks_counts_where_it_is_asked(
    once: Once, checkout: Path, tmp_path: Path, index: bool
) -> None:
    (checkout / "new").write_text("")
    once(index=index)
    subprocess.run(["git", "add", "new"], cwd=checkout, check=True)
    once(index=index)
    assert runs(tmp_path) == (2 if index else 1)


def test_an_ignored_file_does_not_count(
    once: Once, checkout: Path, tmp_path: Path
) -> None:
    once()
    (checkout / "ignored").write_text("")
    once()
    assert runs(tmp_path) == 1


def test_words_and_variables_count(once: Once, tmp_path: Path) -> None:
    words = (sys.executable, "counted.py", str(tmp_path / "log"))
    once(*words)
    once(*words, "more")
    once(*words, PYTEST_NAME="set by no run")
    once(*words, TRITON_NAME="set by no run")
    once(*words, VLLM_NAME="set by no run")
    assert runs(tmp_path) == 5


def test_packages_and_programs_count(
    once: Once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once()
    monkeypatch.setattr("xpustack.checks.once.lock", lambda: "other packages")
    once()
    monkeypatch.setattr("xpustack.commands.once.machine", lambda _: {"git": "2"})
    once()
    assert runs(tmp_path) == 3


def test_a_run_that_changes_the_checkout_is_not_stored(
    once: Once, checkout: Path
) -> None:
    words = (sys.executable, "-c", "open('grows', 'a').write('x')")
    assert [once(*words).exit_code for _ in range(3)] == [0, 0, 0]
    assert (checkout / "grows").read_text() == "xxx"


def test_outside_of_a_clone_everything_runs(
    once: Once, checkout: Path, tmp_path: Path
) -> None:
    (checkout / ".git").rename(tmp_path / "elsewhere")
    assert [once().exit_code for _ in range(2)] == [0, 0]
    assert runs(tmp_path) == 2


def test_a_missing_program_is_named(once: Once) -> None:
    done = once("no-such-program")
    assert done.exit_code == 5
    assert "cannot start no-such-program" in done.stderr
