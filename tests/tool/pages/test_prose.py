# SPDX-License-Identifier: Apache-2.0
"""`docs/` keeps prose and short tables; the rows of `docs/data` fit the series."""

import re
from collections import Counter
from pathlib import Path

import pytest

from xpustack.base.releases import load
from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.series.order import read_order

ROOT = Path(__file__).parents[3]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
DATA = sorted(path.name for path in (ROOT / "docs/data").glob("*.csv"))
CAPABILITIES = read_rows(ROOT / "docs/data/capabilities.csv")
MOST_ROWS = 22
LONGEST_CELL = 220


def tables(text: str) -> list[list[str]]:
    """The lines of each table of a page, heads and all."""
    found = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return [table.splitlines() for table in found]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_prose_with_short_tables(page: str):
    text = (ROOT / "docs" / page).read_text()
    found = tables(text)
    rows = [row for table in found for row in table]
    assert max(map(len, found), default=0) <= MOST_ROWS
    cells = [cell for row in rows for cell in row.split("|")]
    assert max(map(len, cells), default=0) <= LONGEST_CELL
    assert sum(map(len, rows)) <= len(text) / 2


@pytest.mark.parametrize("file", DATA)
def test_a_page_says_where_each_file_of_rows_is(file: str):
    texts = [(ROOT / "docs" / page).read_text() for page in PAGES]
    assert any(f"data/{file}" in text for text in texts)


def span(text: str, names: tuple[str, ...]) -> list[str]:
    """The releases of `v1 to v3` or of `v1, v3`."""
    first, to, last = text.partition(" to ")
    if to:
        return list(names[names.index(first) : names.index(last) + 1])
    return text.split(", ")


@pytest.mark.parametrize("row", CAPABILITIES, ids=lambda row: row["capability"])
def test_the_steps_of_a_capability_are_in_its_releases(row: dict[str, str]):
    releases = span(row["releases"], load(Project(ROOT)).names)
    for step in re.findall(r"`([a-z0-9-]+)`", row["shown by"]):
        for name in releases:
            assert step in read_order(Project(ROOT), name)


def test_a_capability_has_one_row_for_a_release():
    names = load(Project(ROOT)).names
    pairs = Counter(
        (row["capability"], name)
        for row in CAPABILITIES
        for name in span(row["releases"], names)
    )
    assert [pair for pair, count in pairs.items() if count > 1] == []
    assert {name for _, name in pairs} == set(names)


PLAIN = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *(f"docs/{page}" for page in PAGES),
]
UNITS = "bytes|B|KB|MB|tokens|rows|keys|blocks|values|entries|launches|instructions"
UNITS += "|registers|lengths?"
WHOLES = "rank|tile|request|page|block|token|thread|row|layer|step|release"
RIDDLES = re.compile(
    rf"\bmend(?:s|ed|ing)?\b|\bat hand\b|\bladder of proof\b|\ball of it or nothing\b"
    rf"|\b(?:{UNITS}) an? (?:{WHOLES})\b",
    re.IGNORECASE,
)
"""Words that made readers stop, and units 'a thread' where 'per thread' is meant."""


def test_riddles_are_found():
    assert RIDDLES.search("spills 60 KB a thread")
    assert RIDDLES.search("this mends the fault")
    assert not RIDDLES.search(
        "60 KB per thread; a thread spills; it depends; rows as a page"
    )


@pytest.mark.parametrize("page", PLAIN)
def test_a_page_is_plain(page: str):
    found = RIDDLES.findall((ROOT / page).read_text())
    assert found == [], page


PACKAGES = ("xpustack", "planner", "upstream", "kernels", "aot", "emulated_xpu")


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_messages_are_plain(package: str):
    texts = {path: path.read_text() for path in (ROOT / package).rglob("*.py")}
    found = {path.name: RIDDLES.findall(text) for path, text in texts.items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_messages_of_patches_are_plain():
    found = {}
    for path in sorted((ROOT / "patches").rglob("*.patch")):
        if words := RIDDLES.findall(path.read_text().partition("\n---\n")[0]):
            found[f"{path.parent.name}/{path.name}"] = words
    assert found == {}


def test_requests_are_plain():
    texts = {path: path.read_text() for path in (ROOT / "patches").glob("*/request.md")}
    found = {path.parent.name: RIDDLES.findall(text) for path, text in texts.items()}
    assert {step: words for step, words in found.items() if words} == {}
