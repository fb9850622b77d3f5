# SPDX-License-Identifier: Apache-2.0
"""The site in a headless browser, from the disk: `tox -e site`.

Without a browser the tests are skipped; with XPUSTACK_BROWSER=required they fail.
`--screenshots FOLDER` keeps a picture of every page at both widths.
"""

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from lab.planner.page import plans_of
from stack.core.rows import read_rows

ROOT = Path(__file__).parents[2]
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FOUND = BROWSER is not None and DRIVER is not None
REQUIRED = os.environ.get("XPUSTACK_BROWSER") == "required"
MISSING = "chromium and chromedriver are not installed: "
pytestmark = pytest.mark.skipif(
    not FOUND and not REQUIRED, reason=f"{MISSING}the pages are read, not shown"
)
SPHINX = {"search.html", "genindex.html"}
"""Pages without content of ours; the search has a test of its own."""
PHONE, DESK = 390, 1280
TALLEST = 15_000
"""Pixels of a page on a desk."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if not FOUND:
        pytest.fail(f"{MISSING}XPUSTACK_BROWSER=required", pytrace=False)
    options = ChromeOptions()
    options.binary_location = BROWSER or ""
    profile = tmp_path_factory.mktemp("profile")
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER or ""))
    yield driver
    driver.quit()


def open_page(browser: Chrome, site: Path, page: str, width: int = DESK) -> None:
    """Show a page and wait until its tables are ready."""
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get((site / f"{page}.html").as_uri())
    WebDriverWait(browser, 60).until(
        lambda here: here.execute_script(
            "return document.documentElement.dataset.tables !== undefined"
        )
    )
    state = browser.execute_script("return document.documentElement.dataset.tables")
    assert state == "ready"


def pages(site: Path) -> list[str]:
    """Every page of ours, without `.html`."""
    names = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(name.removesuffix(".html") for name in names if name not in SPHINX)


def take_picture(browser: Chrome, width: int, target: Path) -> None:
    script = "return document.documentElement.scrollHeight"
    height = min(browser.execute_script(script), TALLEST)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    picture = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(base64.b64decode(picture["data"]))


def cut_off(browser: Chrome) -> list[str]:
    """Tables, pictures and code that leave the screen in no box that scrolls."""
    return browser.execute_script(
        "const scrolls = part => part && (part.tagName === 'ARTICLE' ? false :"
        " /auto|scroll/.test(getComputedStyle(part).overflowX)"
        " || scrolls(part.parentElement));"
        "return [...document.querySelectorAll('article :is(table, pre, img, svg)')]"
        ".filter(part => part.getBoundingClientRect().right > innerWidth + 1)"
        ".filter(part => !scrolls(part))"
        ".map(part => `${part.tagName} ${part.id || part.textContent.slice(0, 60)}`)"
    )


@pytest.mark.parametrize("wide", [PHONE, DESK])
def test_every_page_loads_without_an_error_and_fits_the_screen(
    browser: Chrome, site: Path, pytestconfig: pytest.Config, wide: int
):
    names = pages(site)
    assert {"index", "steps", "defects", "docs/deploying"} < set(names)
    folder = pytestconfig.getoption("--screenshots")
    browser.get_log("browser")
    faults = []
    for page in names:
        open_page(browser, site, page, wide)
        faults += [
            f"{page}: {entry['message']}"
            for entry in browser.get_log("browser")
            if entry["level"] == "SEVERE"
        ]
        width = browser.execute_script("return document.documentElement.scrollWidth")
        if width > wide:
            faults.append(f"{page}: {width} pixels wide")
        height = browser.execute_script("return document.documentElement.scrollHeight")
        if wide == DESK and height > TALLEST:
            faults.append(f"{page}: {height} pixels high")
        faults += [f"{page}: {what} is cut off" for what in cut_off(browser)]
        if folder:
            name = f"{page.replace('/', '-')}-{wide}.png"
            take_picture(browser, wide, Path(folder) / name)
    assert faults == []


def cells(browser: Chrome, table: int, column: int) -> list[str]:
    """The texts of a column of a table of the page, numbered from 0."""
    script = (
        "return [...document.querySelectorAll('article table')[arguments[0]]"
        ".tBodies[0].rows].map(row => [...row.cells].at(arguments[1]).textContent)"
    )
    return browser.execute_script(script, table, column)


def sort(browser: Chrome, table: int, column: int) -> None:
    script = (
        "[...document.querySelectorAll('article table')[arguments[0]]"
        ".tHead.rows[0].cells].at(arguments[1]).click()"
    )
    browser.execute_script(script, table, column)


def show_all(browser: Chrome) -> None:
    """All rows of every table."""
    for select in browser.find_elements(By.CSS_SELECTOR, ".dt-length select"):
        Select(select).select_by_visible_text("All")


def test_a_long_table_shows_its_first_rows_until_asked(browser: Chrome, site: Path):
    open_page(browser, site, "machine_code")
    assert len(cells(browser, 0, 0)) == 25
    show_all(browser)
    rows = read_rows(ROOT / "docs/data/machine_code.csv")
    assert len(cells(browser, 0, 0)) == len(rows)


def test_a_table_sorts_and_filters(browser: Chrome, site: Path):
    open_page(browser, site, "steps")
    show_all(browser)
    before = cells(browser, 0, 0)
    sort(browser, 0, 0)
    up = cells(browser, 0, 0)
    assert up == sorted(before) != before
    sort(browser, 0, 0)
    assert cells(browser, 0, 0) == up[::-1]
    browser.find_element(By.CSS_SELECTOR, "article input").send_keys("attention-decode")
    found = [slug for slug in before if "attention-decode" in slug]
    WebDriverWait(browser, 10).until(
        lambda here: sorted(cells(here, 0, 0)) == sorted(found)
    )


def test_numbers_sort_as_numbers(browser: Chrome, site: Path):
    open_page(browser, site, "steps")
    show_all(browser)
    sort(browser, 1, 3)
    lines = [int(text) for text in cells(browser, 1, 3)]
    assert lines == sorted(lines) and max(lines) > 99


@pytest.mark.parametrize(
    ("page", "states"),
    [("defects", {"good", "bad", "none"}), ("checkpoints", {"good", "none"})],
)
def test_states_have_a_colour(browser: Chrome, site: Path, page: str, states: set[str]):
    open_page(browser, site, page, PHONE)
    shown = browser.execute_script(
        "return [...document.querySelectorAll('td:is(.good, .bad, .none)')].map(cell =>"
        " [cell.className, getComputedStyle(cell).backgroundColor])"
    )
    colours = {name.split()[0]: colour for name, colour in shown}
    assert states <= set(colours)
    assert "rgba(0, 0, 0, 0)" not in colours.values()
    assert len(set(colours.values())) == len(colours)


@pytest.mark.parametrize("page", ["steps", "defects"])
def test_the_first_column_stays_in_sight(browser: Chrome, site: Path, page: str):
    """And nothing shines through it."""
    open_page(browser, site, page, PHONE)
    moved, left, covered = browser.execute_script(
        "const table = document.querySelector('article table');"
        "const box = table.parentElement; box.scrollLeft = 150;"
        "const cells = [...table.tBodies[0].rows].slice(0, 20).map(r => r.cells[0]);"
        "const left = cells[0].getBoundingClientRect().left;"
        "const covered = cells.filter(cell => {"
        "  cell.scrollIntoView({block: 'center', behavior: 'instant'});"
        "  const place = cell.getBoundingClientRect();"
        "  for (let y = place.top + 2; y < place.bottom - 2; y += 4)"
        "    for (let x = place.left + 2; x < place.right - 2; x += 8)"
        "      if (!cell.contains(document.elementFromPoint(x, y))) return true;"
        "  return false;"
        "});"
        "return [box.scrollLeft, left, covered.map(cell => cell.textContent)]"
    )
    assert moved == 150 and left >= 0
    assert covered == []


def test_long_cells_are_folded_and_unfold(browser: Chrome, site: Path):
    open_page(browser, site, "defects")
    details = browser.find_elements(By.CSS_SELECTOR, "article td details")
    assert len(details) > 10
    assert all(not one.get_attribute("open") for one in details)
    browser.execute_script("arguments[0].open = true", details[0])
    assert len(details[0].text) > 120


@pytest.mark.parametrize("page", ["machine_code", "measurements"])
def test_charts_are_shown_and_legible_on_a_phone(
    browser: Chrome, site: Path, page: str
):
    open_page(browser, site, page, PHONE)
    widths = browser.execute_script(
        "return [...document.querySelectorAll('article img')].map(chart =>"
        " [chart.naturalWidth, chart.getBoundingClientRect().width])"
    )
    assert widths and all(shown >= natural > 300 for natural, shown in widths)


def test_a_report_of_a_device_is_reached(browser: Chrome, site: Path):
    open_page(browser, site, "index")
    link = browser.find_element(By.CSS_SELECTOR, "a[href$='report.html']")
    browser.execute_script("arguments[0].click()", link)
    WebDriverWait(browser, 20).until(lambda here: "report.html" in here.current_url)
    assert "The machine" in browser.find_element(By.CSS_SELECTOR, "article").text


def test_the_search_finds_a_page_from_the_disk(browser: Chrome, site: Path):
    browser.get((site / "search.html").as_uri() + "?q=troubleshooting")
    WebDriverWait(browser, 30).until(
        lambda here: here.find_elements(By.CSS_SELECTOR, "#search-results li a")
    )
    links = browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
    assert any("troubleshooting" in link.get_attribute("href") for link in links)


PLANS = read_rows(ROOT / "docs/data/plans.csv")
MACHINE = ("device", "count", "model", "context", "release")


def told(browser: Chrome) -> list[str]:
    """What the chooser's blocks say: a command each."""
    blocks = browser.find_elements(By.CSS_SELECTOR, "#chooser pre")
    return [" ".join(block.text.replace("\\", " ").split()) for block in blocks]


def test_the_chooser_says_how_to_serve_each_machine(browser: Chrome, site: Path):
    """The planner's command, of the first split that starts."""
    open_page(browser, site, "plans")
    machines = dict.fromkeys(tuple(row[name] for name in MACHINE) for row in PLANS)
    for machine in machines:
        for name, value in zip(MACHINE, machine, strict=True):
            field = browser.find_element(By.NAME, name)
            Select(field).select_by_value(value)
        rows = [row for row in PLANS if tuple(row[n] for n in MACHINE) == machine]
        splits = browser.find_elements(By.CSS_SELECTOR, "#chooser td:first-child")
        assert [cell.text for cell in splits] == [row["split"] for row in rows]
        serves = [row["serve"] for row in rows if row["serve"]]
        plan, *_ = plans_of(rows)
        assert told(browser) == [*serves, " ".join(["xpustack", *plan])]
        assert len(serves) == any(not row["refused"] for row in rows)
