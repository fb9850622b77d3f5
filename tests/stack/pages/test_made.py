# SPDX-License-Identifier: Apache-2.0
"""Rows name the tree that gave them: what is of today, and what is not."""

from pathlib import Path

import pytest
from command_line import invoke
from tiny_stack import TinyStack

from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages import made

TABLES = '[runs]\nkey = ["release", "asked"]\ncommand = "make runs"\n'
HEADS = "release,asked,tree_id,made\n"
OLD = "v2.0,a,,2020-01-02\n"
ON_GPU = "v2.0,a,,2020-01-02,make kept\n"


@pytest.fixture
def stack(tmp_path: Path, tiny: TinyStack) -> TinyStack:
    stack = tiny.copy(tmp_path)
    stack.write(made.TABLES, TABLES)
    return stack


def test_a_row_is_of_today_until_its_release_has_another_tree(stack: TinyStack):
    stamp = made.stamp(stack.project, "v2.0")
    row = f"{stamp['tree_id']},{stamp['made']}"
    stack.write("docs/data/runs.csv", f"{HEADS}v2.0,a,{row}\nv1.0,a,,2020-01-02\n")
    found = {age.release: (age.current, age.older) for age in made.ages(stack.project)}
    assert found == {"v2.0": (1, 0), "v1.0": (0, 1)}
    stack.add("raise-more", {"vllm/more.py": "# SPDX\n"}, "v2.0")
    assert [age.older for age in made.ages(stack.project)] == [1, 1]
    shown = made.ages_table(made.ages(stack.project)).splitlines()[2]
    assert shown == (
        f"| [runs](data/runs.csv) |  | v2.0 ({stamp['made']}), v1.0 (2020-01-02) |"
    )


def test_rows_of_no_release_are_of_the_newest(stack: TinyStack):
    """As machine code: the checkout's, and beside it upstream's."""
    rows = made.stamped(
        stack.project, [{"by": "us"}, {"release": "v1.0", "by": "them"}]
    )
    assert [row["release"] for row in rows] == ["v2.0", "v1.0"]
    trees = [made.tree_of(stack.project, name) for name in ("v2.0", "v1.0")]
    assert [row["tree_id"] for row in rows] == trees and trees[0] != trees[1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("v2.0,a,main,2020-01-02\n", "a row has 'main' for the id of its tree"),
        ("v2.0,a,,today\n", "a row has 'today' for its day"),
        (f"{OLD}{OLD}", "two rows are of one cell"),
    ],
)
def test_a_malformed_row_is_named(stack: TinyStack, rows: str, says: str):
    stack.write("docs/data/runs.csv", HEADS + rows)
    with pytest.raises(UsageError, match=says) as caught:
        list(made.ages(stack.project))
    assert caught.value.detail == ("v2.0, a",)
    assert caught.value.hint == "make runs"


@pytest.mark.parametrize("left", ["tree_id", "made", "command"])
def test_a_row_without_tree_day_or_command_is_named(stack: TinyStack, left: str):
    """Each row names its command where its file has none."""
    row = {"release": "v2.0", "asked": "a", "tree_id": "", "made": "2020-01-02"}
    row["command"] = "make runs --on GPU"
    stack.write(made.TABLES, TABLES.replace("command", "by"))
    stack.write("docs/data/runs.csv", csv_text([row]))
    assert list(made.ages(stack.project))
    del row[left]
    stack.write("docs/data/runs.csv", csv_text([row]))
    with pytest.raises(UsageError, match="a row has None"):
        list(made.ages(stack.project))


def test_a_malformed_entry_is_named(stack: TinyStack):
    stack.write(made.TABLES, TABLES + "maker = 1\n")
    with pytest.raises(UsageError, match=r"tables\.toml: .*maker"):
        list(made.ages(stack.project))


def test_renew_runs_the_commands_of_older_rows(
    stack: TinyStack, monkeypatch: pytest.MonkeyPatch
):
    stack.write("docs/data/runs.csv", HEADS + OLD)
    stack.write("docs/data/kept.csv", f"release,asked,tree_id,made,command\n{ON_GPU}")
    kept = '[kept]\nkey = ["release", "asked"]\nby = "a person"\n'
    stack.write(made.TABLES, TABLES.replace("make runs", "touch made") + kept)
    monkeypatch.chdir(stack.project.root)
    done = invoke("renew")
    assert (done.exit_code, done.stdout.count("touch made")) == (0, 1)
    assert "kept.csv: a person" in done.stdout
    assert not (stack.project.root / "made").exists()
    assert invoke("renew", "--run").exit_code == 0
    assert (stack.project.root / "made").exists()
    stack.write(made.TABLES, TABLES.replace("make runs", "false") + kept)
    failed = invoke("renew", "--run")
    assert failed.exit_code and "no new rows: this failed: false" in failed.output


def test_each_file_of_rows_says_what_makes_it(real_project: Project):
    folder = real_project.root / made.FOLDER
    tables = made.tables(real_project)
    assert {f"{name}.csv" for name in tables} == {p.name for p in folder.glob("*.csv")}
    assert all(bool(one.command) != bool(one.by) for one in tables.values())
    for name, table in tables.items():
        if not table.held_to:
            assert table.key, f"{name}: rows of a run have a key"
            assert made.checked(real_project, name, table), name
        assert (real_project.root / table.held_to).exists(), name
