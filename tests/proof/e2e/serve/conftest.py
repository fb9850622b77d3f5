# SPDX-License-Identifier: Apache-2.0
"""A server of each release that answers the tests of its requests, and the table of
what came out: `--write-table` writes docs/data/serve.csv."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.e2e.running.chat_drafts import ALONE, DSPARK, server_with
from proof.e2e.running.chat_requests import spoken
from proof.e2e.running.server import Server
from proof.e2e.running.serving import Engines
from stack.base.releases import load
from stack.core.project import Project
from stack.core.rows import csv_text, read_rows
from stack.pages.made import stamp

TABLE = "docs/data/serve.csv"
FAILED = "failed"
LACKING = {"has no": "no such feature", "refuses": "refused"}
"""Outcome of a skipped test, by what its reason says of the release that it names."""
_found: dict[tuple[str, str], str] = {}
"""What a passed test shows, by what is asked and by release."""


@pytest.fixture(scope="session")
def server(engines: Engines, release: str) -> Iterator[Server]:
    """`vllm serve`, up; one of a release for all tests that leave it running."""
    with Server(engines, release) as started:
        yield started.wait()


@pytest.fixture(scope="session")
def asked(
    request: pytest.FixtureRequest, engines: Engines, release: str
) -> Iterator[Server]:
    """The server, or one with drafts that know how the first one goes on; one of each
    kind for all tests that ask it."""
    if request.param == DSPARK and not engines.has_dspark(release):
        pytest.skip(f"{release} has no DSpark for DeepSeek-V4 on XPU")
    server = request.getfixturevalue("server")
    if request.param == ALONE:
        yield server
        return
    with server_with(engines, release, request.param, spoken(server)) as drafting:
        yield drafting


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "shows(asked, outcome): a row of the table; the outcome is `equal` (to the"
        " engine alone, to the request alone, or to what was asked for) or `refused`;"
        " for a skipped test, what its reason says that the release lacks or refuses",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("shows")
    if not marker or not isinstance(item, pytest.Function):
        return report
    given = item.callspec.params
    asked, outcome = marker.args
    drafts = given.get("asked", given.get("drafts", ALONE))
    if drafts != ALONE:
        asked = f"{asked}, drafts by {drafts}"
    key = asked, given["release"]
    if report.skipped and not hasattr(report, "wasxfail"):
        if lacking := what_it_lacks(report, given["release"]):
            _found.setdefault(key, lacking)
    elif call.when == "call" and _found.get(key) != FAILED:
        _found[key] = outcome if report.passed else FAILED
    return report


def what_it_lacks(report: pytest.TestReport, release: str) -> str | None:
    """The outcome of a skipped test, if it is for the release and not for what this
    machine lacks."""
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ")
    found = [words for words in LACKING if reason.startswith(f"{release} {words} ")]
    return LACKING[found[0]] if found else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not (_found and session.config.option.write_table):
        return
    project = Project.find(Path(__file__).parent)
    path = project.root / TABLE
    known = {(row["asked"], row["release"]): row for row in read_rows(path)}
    for (asked, release), outcome in _found.items():
        row = {"release": release, "asked": asked, "outcome": outcome}
        known[asked, release] = row | stamp(project, release)
    asked = list(dict.fromkeys(asked for asked, _ in known))
    names = list(reversed(load(project).names))
    rows = [
        known[one, release]
        for release in names
        for one in asked
        if (one, release) in known
    ]
    path.write_text(csv_text(rows))
