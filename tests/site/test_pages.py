# SPDX-License-Identifier: Apache-2.0
"""The site as files: the builder takes every page, links lead somewhere, nothing comes
from a network. `tox -e unit` builds the site for these tests."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from stack.base.releases import load
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages.site.build import FOLDER, LINE, TABLES

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text("utf-8") for page in TABLES}
pytestmark = pytest.mark.filterwarnings("ignore:'myst_parser.* is deprecated")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, BeautifulSoup]:
    return {
        path: BeautifulSoup(path.read_text("utf-8"), "html.parser")
        for path in sorted(site.rglob("*.html"))
    }


def ids(page: BeautifulSoup) -> set[str]:
    return {tag["id"] for tag in page.find_all(id=True)}


def addresses(page: BeautifulSoup) -> Iterator[tuple[str, str, str]]:
    """Each address on a page: the tag, the attribute, the address."""
    for tag, attribute in (
        ("a", "href"),
        ("link", "href"),
        ("script", "src"),
        ("img", "src"),
    ):
        for found in page.find_all(tag):
            if value := found.get(attribute):
                yield tag, attribute, value


def test_every_link_resolves(pages: dict[Path, BeautifulSoup]):
    anchors = {path.resolve(): ids(page) for path, page in pages.items()}
    broken = []
    for path, page in pages.items():
        for _, _, address in addresses(page):
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = path
            if parts.path:
                target = (path.parent / unquote(parts.path)).resolve()
            fragment = unquote(parts.fragment)
            target = target.resolve()
            if not target.is_file():
                broken.append(f"{path.name}: {address}: no such file")
            elif fragment and target in anchors and fragment not in anchors[target]:
                broken.append(f"{path.name}: {address}: no such place")
    assert broken == []


def test_nothing_comes_from_a_network(site: Path, pages: dict[Path, BeautifulSoup]):
    for path, page in pages.items():
        for tag, _, address in addresses(page):
            if tag != "a":
                assert not urlsplit(address).netloc, f"{path.name}: {address}"
    for style in site.rglob("*.css"):
        urls = re.findall(
            r"url\(['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)", style.read_text()
        )
        for url in (first or second for first, second in urls):
            assert not urlsplit(url).netloc, f"{style.name}: {url}"


@pytest.mark.parametrize("name", PAGES)
def test_each_row_is_in_a_regular_table(
    site: Path, pages: dict[Path, BeautifulSoup], name: str
):
    files = [file for _, file in LINE.findall(PAGES[name])]
    tables = pages[site / f"{name}.html"].find_all("table")
    for table in tables:
        width = len(table.thead.find_all("th"))
        rows = table.tbody.find_all("tr")
        assert {len(row.find_all("td")) for row in rows} == {width}
    for file, table in zip(files, tables[-len(files) :], strict=True):
        rows = read_rows(ROOT / FOLDER / file)
        assert len(table.tbody.find_all("tr")) == len(rows) > 10


def test_each_release_has_its_column(site: Path, pages: dict[Path, BeautifulSoup]):
    names = load(Project(ROOT)).names
    for page in ("steps", "defects"):
        grid = pages[site / f"{page}.html"].find("table")
        heads = [cell.get_text() for cell in grid.thead.find_all("th")]
        assert tuple(heads[-len(names) :]) == names


def test_each_chart_is_a_picture_with_a_title(
    site: Path, pages: dict[Path, BeautifulSoup]
):
    counts = {}
    for name in PAGES:
        pictures = pages[site / f"{name}.html"].article.find_all("img")
        assert all(picture["alt"] for picture in pictures)
        counts[name] = len(pictures)
    assert {name for name, count in counts.items() if count} == {
        *("machine_code", "measurements")
    }
    assert counts["machine_code"] == 2 and counts["measurements"] > 10


def test_a_page_links_each_file_of_rows(pages: dict[Path, BeautifulSoup]):
    linked = {
        urlsplit(address).path.rpartition("/")[2]
        for page in pages.values()
        for tag, _, address in addresses(page)
        if tag == "a"
    }
    assert {path.name for path in (ROOT / "docs/data").glob("*.csv")} <= linked


def test_the_raw_rows_can_be_taken_along(site: Path):
    for name in ("machine_code.csv", "cost_model.csv", "benchmark.csv"):
        [path] = site.rglob(name)
        with open(path, encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) > 20 and "op" in rows[0]
