# SPDX-License-Identifier: Apache-2.0
"""A retired release is built by the stack of the last commit that has it."""

import subprocess
import textwrap
from pathlib import Path

import pytest
from fake_stack import FakeStack, git

from stack.base.releases import Retired, load
from stack.core.errors import SourceError, StackError
from stack.core.project import Project
from stack.release.retired import build_retired

TOOL = """\
import json, sys
from pathlib import Path

words = sys.argv[1:]
release, to = words[1], Path(words[words.index("--to") + 1])
built = {"release": release, "version": "1.0", "directory": str(to / release),
         "wheel": "a.whl", "files": {"a.whl": "0"}, "seconds": 1.0}
"""
GOOD = 'print(json.dumps({"errors": [], "data": {"built": [built]}}))\n'
BAD = """\
error = {"error": "SourceError", "exit_code": 3, "message": "no archive",
         "release": release, "step": None, "file": "f", "detail": ["d"], "next": "n"}
print(json.dumps({"errors": [error], "data": {"built": []}}))
sys.exit(3)
"""


def former(stack: FakeStack, end: str) -> Retired:
    """A commit whose tool ends in the given way, and which a later one replaces."""
    stack.write("xpustack/__init__.py", "")
    stack.write("xpustack/__main__.py", TOOL + textwrap.dedent(end))
    root = stack.project.root
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "As it was")
    commit = git(root, "rev-parse", "HEAD").strip()
    stack.write("xpustack/__main__.py", "raise SystemExit('the tool of today')\n")
    git(root, "commit", "--quiet", "--all", "--message", "As it is")
    return Retired("0.9.0", commit)


def test_the_tool_of_that_commit_builds(stack: FakeStack, tmp_path: Path) -> None:
    old = former(stack, GOOD)
    made = build_retired(stack.project, stack.cache, old, tmp_path / "dist")
    assert made.release == "v0.9.0" and made.wheel == "a.whl"
    assert made.directory == tmp_path / "dist/v0.9.0"


def test_its_error_is_ours(stack: FakeStack, tmp_path: Path) -> None:
    old = former(stack, BAD)
    with pytest.raises(SourceError, match="no archive") as caught:
        build_retired(stack.project, stack.cache, old, tmp_path)
    assert caught.value.release == "v0.9.0" and caught.value.hint == "n"


def test_a_tool_that_breaks_is_shown(stack: FakeStack, tmp_path: Path) -> None:
    old = former(stack, "sys.exit(7)\n")
    with pytest.raises(StackError, match="exit status 7") as caught:
        build_retired(stack.project, stack.cache, old, tmp_path)
    assert "xpustack build v0.9.0 --json" in (caught.value.hint or "")


def test_history_has_the_commits_of_all_retired_releases(real_project: Project) -> None:
    root = str(real_project.root)
    shallow = subprocess.run(
        ["git", "-C", root, "rev-parse", "--is-shallow-repository"],
        capture_output=True,
        text=True,
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("a shallow clone has one commit alone, an archive none")
    for old in load(real_project).retired:
        kept = f"{old.commit}:patches/{old.name}/series"
        done = subprocess.run(["git", "-C", root, "cat-file", "-e", kept])
        assert done.returncode == 0, kept
