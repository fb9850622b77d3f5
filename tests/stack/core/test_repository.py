# SPDX-License-Identifier: Apache-2.0
"""The git commands of a repository and their results."""

import ast
from pathlib import Path

import pytest

from stack.core.checkout import Checkout
from stack.core.git import GitFailed
from stack.core.repository import Change, Commit, NoSuchPath, Repository

PACKAGE = Path(__file__).parents[3] / "stack"


class Places:
    """An empty repository, and commits of whole trees in it."""

    def __init__(self, root: Path) -> None:
        self.git = Repository(root / "git", index=root / "index")
        self.git.initialize()
        self.scratch = root / "scratch"
        self.scratch.mkdir()
        empty = self.git.text("hash-object", "-t", "tree", "-w", "--stdin", data=b"")
        self.root = self.git.text("commit-tree", empty, data=b"root\n")

    def commit(
        self, files: dict[str, str], parent: str = "", message: str = "x"
    ) -> str:
        self.git.run("read-tree", "--empty")
        contents = {path: text.encode() for path, text in files.items()}
        self.git.add(contents, self.scratch)
        tree = self.git.write_tree()
        return self.git.commit_tree(tree, parent or self.root, message)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def test_git_is_started_in_core_alone() -> None:
    """Only core calls `run` and `text` of a repository, which take git arguments; and
    what reads or writes a contributor's clone, of which core knows nothing."""
    clones = (PACKAGE / "base/clone.py", PACKAGE / "upstream/branches.py")
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "core" or path in clones:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.List) and node.elts:
                first = node.elts[0]
                starts = isinstance(first, ast.Constant) and first.value == "git"
                assert not starts, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                raw = node.args[:1] and isinstance(
                    node.args[0], ast.Starred | ast.Constant
                )
                place = f"{path}:{node.lineno}"
                assert node.func.attr not in ("run", "text") or not raw, place


def test_paths_are_literal(places: Places) -> None:
    files = {"a/x.py": "1", "a/y.py": "2", "a/*.py": "3"}
    old = places.commit(files)
    new = places.commit({path: f"{text}+" for path, text in files.items()}, old)
    assert list(places.git.files(new, ["a/*.py"])) == ["a/*.py"]
    assert list(places.git.files(new, ["a"])) == sorted(files)
    assert places.git.diff(old, new, ["a/*.py"]).count(b"diff --git") == 1


def test_no_paths_are_no_files_and_none_are_all(places: Places) -> None:
    old = places.commit({"a": "1\n"})
    new = places.commit({"a": "2\n", "b": "3\n"}, old)
    assert places.git.files(new, []) == {} and len(places.git.files(new)) == 2
    assert places.git.diff(old, new, []) == b""
    assert places.git.diff(old, new).count(b"diff --git") == 2


def test_changes_have_both_sides(places: Places) -> None:
    old = places.commit({"changed": "1", "gone": "2"})
    new = places.commit({"changed": "3", "a\u00e9": "2"}, old)
    before, after = places.git.files(old), places.git.files(new)
    assert places.git.changes(old, new) == [
        Change("a\u00e9", "A", None, after["a\u00e9"]),
        Change("changed", "M", before["changed"], after["changed"]),
        Change("gone", "D", before["gone"], None),
    ]


def test_a_missing_file_has_an_error_of_its_own(places: Places) -> None:
    commit = places.commit({"a": "1"})
    assert places.git.file(commit, "a") == b"1"
    with pytest.raises(NoSuchPath) as caught:
        places.git.file(commit, "b")
    assert "path 'b' does not exist" in caught.value.stderr


def test_the_log_is_the_commits_with_their_words(places: Places) -> None:
    first = places.commit({"a": "1"}, message="One\n\n  indented\n")
    second = places.commit({"a": "2"}, first, "Two\n")
    older, newer = places.git.log(places.root, second)
    assert (older.id, older.parents) == (first, (places.root,))
    assert (newer.id, newer.tree) == (second, places.git.tree_of(second))
    assert older.message == "One\n\n  indented\n"
    assert places.git.log(second, second) == []


def test_a_merge_gives_a_tree_or_its_conflicts(places: Places) -> None:
    base = places.commit({"a": "1\n", "b": "1\n"})
    ours = places.commit({"a": "2\n", "b": "1\n"}, base)
    theirs = places.commit({"a": "1\n", "b": "2\n"}, base)
    other = places.commit({"b": "1\n"}, base)
    tree, conflicts = places.git.merge(ours, theirs)
    assert tree is not None and conflicts == []
    assert places.git.file(tree, "a") + places.git.file(tree, "b") == b"2\n2\n"
    tree, (conflict,) = places.git.merge(ours, other)
    assert (tree, conflict.path, conflict.kind) == (None, "a", "modify/delete")


def test_refs_and_what_no_ref_reaches(places: Places) -> None:
    kept, gone = places.commit({"a": "1"}), places.commit({"a": "2"})
    places.git.set_ref("refs/steps/kept", kept)
    places.git.set_ref("refs/steps/gone", gone)
    commits = [Commit(commit, places.git.tree_of(commit)) for commit in (gone, kept)]
    assert list(places.git.refs("refs/steps/").values()) == commits
    asked = ["refs/steps/kept", "refs/steps/absent", "refs/steps/gone"]
    assert places.git.commits(asked) == dict(
        zip(asked[::2], commits[::-1], strict=True)
    )
    places.git.delete_refs(["refs/steps/gone"])
    places.git.prune(packs=True)
    assert places.git.refs() == {"refs/steps/kept": commits[1]}
    with pytest.raises(GitFailed):
        places.git.tree_of(gone)


def test_a_checkout_of_a_copied_history(places: Places, tmp_path: Path) -> None:
    commit = places.commit({"a": "1", "folder/b": "2"})
    work = Checkout.of(tmp_path / "work")
    work.initialize()
    work.copy_history(places.git, [commit])
    work.set_ref("refs/heads/mine", commit)
    work.set_head("refs/heads/mine")
    work.check_out(commit)
    assert work.head() == "refs/heads/mine"
    assert work.commit_of("HEAD") == commit
    assert work.status() == []
    (work.work_tree / "a").write_text("changed")
    (work.work_tree / "new").write_text("")
    assert work.status() == [" M a", "?? new"]
    work.clean()
    work.check_out(commit)
    assert work.status() == [] and not (work.work_tree / "new").exists()
    work.run("checkout", "--quiet", "--detach")
    assert work.head() is None
