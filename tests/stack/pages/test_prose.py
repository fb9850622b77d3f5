# SPDX-License-Identifier: Apache-2.0
"""`docs/` keeps short tables; the rows of `docs/data` fit the series."""

import re
from collections import Counter
from pathlib import Path

import pytest

from stack.base.releases import load
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.series.order import read_order

ROOT = Path(__file__).parents[3]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
DATA = sorted(path.name for path in (ROOT / "docs/data").glob("*.csv"))
CAPABILITIES = read_rows(ROOT / "docs/data/capabilities.csv")
MOST_ROWS = 22
MOST_WORDS = {"README.md": 700, "all pages": 25_000}
LONGEST_CELL = 220


def tables(text: str) -> list[list[str]]:
    """The lines of each table of a page, heads and all."""
    found = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return [table.splitlines() for table in found]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_short(page: str):
    text = (ROOT / "docs" / page).read_text()
    found = tables(text)
    rows = [row for table in found for row in table]
    assert max(map(len, found), default=0) <= MOST_ROWS
    cells = [cell for row in rows for cell in row.split("|")]
    assert max(map(len, cells), default=0) <= LONGEST_CELL


def test_the_pages_can_be_read():
    """Words are what has a letter or a digit, in tables and blocks as well."""
    texts = {
        name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")
    }
    texts |= {page: (ROOT / "docs" / page).read_text() for page in PAGES}
    texts["all pages"] = " ".join(texts.values())
    for name, most in MOST_WORDS.items():
        assert sum(bool(re.search(r"\w", w)) for w in texts[name].split()) <= most, name


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
