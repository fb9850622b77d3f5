# SPDX-License-Identifier: Apache-2.0
"""The site in a headless browser, from the disk: `tox -e site`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="chromium and chromedriver are not installed: the pages are read, not shown",
)
PAGES = (
    "index",
    "steps",
    "defects",
    "machine_code",
    "measurements",
    "docs/deploying",
    "docs/defects",
    "docs/steps",
    "docs/capabilities",
    "docs/checkpoints",
    "docs/xpu_branches",
    "docs/layers",
    "docs/kernels",
    "docs/xpu_path",
    "docs/e2e",
    "branches",
    "capabilities",
    "engine",
    "xpu_path",
    "layer",
    "devices",
    "checkpoints",
    "docs/devices/nvidia-h200/report",
    "docs/upstreaming",
    "docs/decisions",
    "CONTRIBUTING",
)
PHONE, DESK = 390, 1280
ROOT = Path(__file__).parents[2]
CHECKPOINTS = "docs/data/checkpoints.csv"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
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


@pytest.mark.parametrize("wide", [PHONE, DESK])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_without_an_error_and_fits_the_screen(
    browser: Chrome, site: Path, page: str, wide: int
):
    if page == "checkpoints" and not (ROOT / CHECKPOINTS).is_file():
        pytest.skip(f"{CHECKPOINTS}: nobody ran the kinds of checkpoints yet")
    browser.get_log("browser")
    open_page(browser, site, page, wide)
    severe = [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"
    ]
    assert severe == []
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= wide


def first_cells(browser: Chrome, table: str) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".map(row => row.cells[0].textContent)"
    )
    return browser.execute_script(script, table)


def test_a_table_sorts_and_filters(browser: Chrome, site: Path):
    open_page(browser, site, "steps")
    before = first_cells(browser, "steps-matrix")
    head = browser.find_element(By.CSS_SELECTOR, "#steps-matrix thead th")
    browser.execute_script("arguments[0].scrollIntoView()", head)
    browser.execute_script("arguments[0].click()", head)
    up = first_cells(browser, "steps-matrix")
    assert up == sorted(before) != before
    browser.execute_script("arguments[0].click()", head)
    assert first_cells(browser, "steps-matrix") == up[::-1]
    box = browser.find_element(By.CSS_SELECTOR, "#steps-matrix_wrapper input")
    box.send_keys("attention-decode")
    WebDriverWait(browser, 10).until(
        lambda here: first_cells(here, "steps-matrix") == ["attention-decode"]
    )


def test_numbers_sort_as_numbers(browser: Chrome, site: Path):
    open_page(browser, site, "steps")
    head = browser.find_elements(By.CSS_SELECTOR, "#step-rows thead th")[3]
    browser.execute_script("arguments[0].click()", head)
    lines = browser.execute_script(
        "return [...document.querySelectorAll('#step-rows tbody tr')]"
        ".map(row => Number(row.cells[3].textContent))"
    )
    assert lines == sorted(lines) and max(lines) > 99


def test_the_first_column_stays_in_sight(browser: Chrome, site: Path):
    open_page(browser, site, "steps", PHONE)
    moved, left = browser.execute_script(
        "const table = document.getElementById('steps-matrix');"
        "const box = table.parentElement; box.scrollLeft = 400;"
        "const place = row => row.cells[0].getBoundingClientRect().left;"
        "return [box.scrollLeft, place(table.tBodies[0].rows[3])]"
    )
    assert moved == 400 and left >= 0


def test_long_cells_are_folded_and_unfold(browser: Chrome, site: Path):
    open_page(browser, site, "defects")
    details = browser.find_elements(By.CSS_SELECTOR, "article td details")
    assert len(details) > 10
    assert all(not one.get_attribute("open") for one in details)
    browser.execute_script("arguments[0].open = true", details[0])
    assert len(details[0].text) > 120


def test_charts_have_bars_of_both_groups(browser: Chrome, site: Path):
    open_page(browser, site, "machine_code")
    script = (
        "return [...document.querySelectorAll('svg.chart')].map(chart =>"
        " [...new Set([...chart.querySelectorAll('rect')].slice(2)"
        ".map(bar => bar.getAttribute('fill')))].length)"
    )
    loops, spills = browser.execute_script(script)
    # This stack spills nowhere.
    assert (loops, spills) == (2, 1)


def test_a_chart_is_legible_on_a_phone(browser: Chrome, site: Path):
    open_page(browser, site, "machine_code", PHONE)
    chart = browser.find_element(By.CSS_SELECTOR, "svg.chart")
    assert chart.rect["width"] >= 600


def test_the_layer_is_drawn_with_its_steps(browser: Chrome, site: Path):
    open_page(browser, site, "layer")
    parts = browser.find_elements(By.CSS_SELECTOR, "ol.layer > li")
    assert len(parts) > 10
    tops = [part.location["y"] for part in parts]
    assert tops == sorted(tops)
    assert len(browser.find_elements(By.CSS_SELECTOR, "ol.layer li li code")) > 30


def test_the_plot_of_the_benchmark_is_shown(browser: Chrome, site: Path):
    open_page(browser, site, "measurements")
    script = (
        "return [...document.querySelectorAll('article img')].map(i => i.naturalWidth)"
    )
    widths = browser.execute_script(script)
    assert widths and all(width > 0 for width in widths)


def test_a_report_of_a_device_is_reached(browser: Chrome, site: Path):
    open_page(browser, site, "devices")
    link = browser.find_element(By.CSS_SELECTOR, "#device-rows tbody a")
    browser.execute_script("arguments[0].click()", link)
    WebDriverWait(browser, 20).until(lambda here: "report.html" in here.current_url)
    assert "The machine" in browser.find_element(By.CSS_SELECTOR, "article").text


def test_the_search_finds_a_page_from_the_disk(browser: Chrome, site: Path):
    browser.get((site / "search.html").as_uri() + "?q=troubleshooting")
    WebDriverWait(browser, 30).until(
        lambda here: here.find_elements(By.CSS_SELECTOR, "#search-results li a")
    )
    links = browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
    assert any("deploying" in link.get_attribute("href") for link in links)
