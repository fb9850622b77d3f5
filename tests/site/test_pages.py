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

from xpustack.base.releases import load
from xpustack.core.project import Project
from xpustack.pages.site.listings import LISTINGS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:'myst_parser.* is deprecated")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, BeautifulSoup]:
    return {
        path: BeautifulSoup(path.read_text("utf-8"), "html.parser")
        for path in sorted(site.rglob("*.html"))
    }


def ids(page: BeautifulSoup) -> set[str]:
    return {tag["id"] for tag in page.find_all(id=True)}


def test_no_page_has_two_places_of_one_name(
    site: Path, pages: dict[Path, BeautifulSoup]
):
    names = ("steps", "defects", "machine_code", "measurements", *LISTINGS)
    for name in names:
        page = pages[site / f"{name}.html"]
        assert len(page.find_all(id=True)) == len(ids(page)), name


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


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("steps", "steps-matrix"),
        ("steps", "step-rows"),
        ("defects", "defects-grid"),
        ("defects", "defects-figures"),
        ("capabilities", "capability-rows"),
        ("engine", "engine-rows"),
        ("branches", "xpu-branches"),
        ("branches", "xpu-no-branch"),
        ("xpu_path", "xpu-path-rows"),
        ("machine_code", "machine-code-rows"),
        ("machine_code", "cost-model"),
        ("measurements", "measurement-rows"),
        ("measurements", "attention-rows"),
    ],
)
def test_a_table_of_data_is_there_and_regular(
    site: Path, pages: dict[Path, BeautifulSoup], page: str, table: str
):
    found = pages[site / f"{page}.html"].find("table", id=table)
    assert found is not None
    width = len(found.thead.find_all("th"))
    rows = found.tbody.find_all("tr")
    assert len(rows) > 10
    assert {len(row.find_all("td")) for row in rows} == {width}


def test_each_release_has_its_column(site: Path, pages: dict[Path, BeautifulSoup]):
    names = load(Project(ROOT)).names
    for page, table in (("steps", "steps-matrix"), ("defects", "defects-grid")):
        found = pages[site / f"{page}.html"].find("table", id=table)
        heads = [cell.get_text() for cell in found.thead.find_all("th")]
        assert tuple(heads[-len(names) :]) == names


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
