# SPDX-License-Identifier: Apache-2.0
"""The figures of vLLM's own tests on the page follow from the rows."""

from pathlib import Path

from stack.core.rows import read_rows

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/upstreaming.md").read_text()
ROWS = read_rows(ROOT / "docs/data/upstream_tests.csv")
NEEDS = read_rows(ROOT / "docs/data/upstream_not_run.csv")
NAMES = {"CUDA": "cuda", "CPU": "cpu", "emulated XPU": "emulated"}
RAN = ("passed_before", "passed_after", "failed_before", "failed_after")


def ran(row: dict[str, str]) -> bool:
    return any(int(row[name]) for name in RAN)


def table(header: str) -> list[list[str]]:
    """The cells of the page's table with that header."""
    rows = PAGE.split(header)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_each_platforms_figures() -> None:
    for name, files, outcomes, passed in table("| platform | files |"):
        rows = [row for row in ROWS if row["platform"] == NAMES[name]]
        both = sum(
            min(int(row["passed_before"]), int(row["passed_after"])) for row in rows
        )
        assert (int(files), int(outcomes)) == (len(rows), sum(map(ran, rows)))
        assert int(passed.replace(",", "")) == both


def test_each_file_without_outcome_says_what_it_needs() -> None:
    with_outcomes = {row["file"] for row in ROWS if ran(row)}
    without = {row["file"] for row in ROWS} - with_outcomes
    assert {row["file"] for row in NEEDS} == without
    assert f"**{len(without)} files have no outcome**" in PAGE
    assert f"{len(with_outcomes)} have tests that ran" in PAGE
    assert f"that {len(with_outcomes | without)} files of its tests name" in PAGE
    killed = {row["file"] for row in ROWS if "killed at its limit" in row["not_run"]}
    assert f"{len(killed)} files were killed at a limit" in PAGE


def test_where_the_steps_stand() -> None:
    rows = read_rows(ROOT / "docs/data/requests.csv")
    needs = {
        row["step"]: row["stands"].removeprefix("after ").split(", ")
        for row in rows
        if row["stands"].startswith("after ")
    }
    most = max(needs, key=lambda step: len(needs[step]))
    assert {row["release"] for row in rows} == {"v0.33.0"}
    alone = sum(row["stands"] == "alone" for row in rows)
    said = " ".join(PAGE.split())
    assert (
        f"{len(rows)} steps of v0.33.0: {alone} stand alone, {len(needs)} after others,"
        f" at most {len(needs[most])} (`{most}`)."
    ) in said
    assert alone + len(needs) == len(rows)
