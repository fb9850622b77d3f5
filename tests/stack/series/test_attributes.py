# SPDX-License-Identifier: Apache-2.0
"""What git does to this repository's files on a machine with settings of its own."""

import shutil
from pathlib import Path

import pytest
from fake_stack import FakeStack, commit, git

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("setting", ["true", "input"])
def test_a_clone_with_other_line_ends_has_the_same_files(
    stack: FakeStack, setting: str
) -> None:
    """One patch has a hunk of a file with carriage returns, as upstream has such."""
    work = stack.apply()
    commit(work, "fourth", {"vllm/windows.py": "one\r\nthree\r\n"})
    stack.save(work)
    root = stack.project.root
    shutil.copyfile(ROOT / ".gitattributes", root / ".gitattributes")
    (root / "picture.bin").write_bytes(b"\0\r\n\n")
    before = stack.contents()
    configuration = ("-c", f"core.autocrlf={setting}", "-c", "core.safecrlf=false")
    git(root, *configuration, "init", "-q")
    git(root, *configuration, "add", ".")
    git(root, "commit", "-qm", "All")
    clone = stack.root / "clone"
    place = ("-q", "-c", f"core.autocrlf={setting}", str(root), str(clone))
    git(stack.root, "clone", *place)
    after = {name: (clone / name).read_bytes() for name in before}
    assert after == before
