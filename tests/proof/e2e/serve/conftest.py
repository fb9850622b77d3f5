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
NOT_TRIED, FAILED = "not tried", "failed"
_found: dict[tuple[str, str], str] = {}
"""What a passed test shows, by what is asked and by release."""


@pytest.fixture(scope="session")
def server(engines: Engines, release: str) -> Iterator[Server]:
    """`vllm serve`, up; one of a release for all tests that leave it running."""
    with Server(engines, release) as started:
        yield started.wait()


@pytest.fixture(scope="session")
def asked(
    request: pytest.FixtureRequest, engines: Engines, release: str, server: Server
) -> Iterator[Server]:
    """The server, or one with drafts that know how the first one goes on; one of each
    kind for all tests that ask it."""
    if request.param == ALONE:
        yield server
        return
    if request.param == DSPARK and not engines.has_dspark(release):
        pytest.skip(f"{release} has no DSpark for DeepSeek-V4 on XPU")
    texts = spoken(server, calls=request.config.option.full)
    with server_with(engines, release, request.param, texts) as drafting:
        yield drafting


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "shows(asked, outcome): a row of the table; the outcome is `equal` (to the"
        " engine alone, to the request alone, or to what was asked for) or `refused`;"
        " what a skipped test records by this name stands instead",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("shows")
    recorded = dict(item.user_properties).get("shows")
    ended = call.when == "call" or (call.when == "setup" and recorded is not None)
    if marker and ended and isinstance(item, pytest.Function):
        asked, outcome = marker.args
        if not report.passed:
            expected = hasattr(report, "wasxfail")
            outcome = NOT_TRIED if report.skipped and not expected else FAILED
            outcome = recorded or outcome
        given = item.callspec.params
        drafts = given.get("asked", given.get("drafts", ALONE))
        if drafts != ALONE:
            asked = f"{asked}, drafts by {drafts}"
        key = asked, item.callspec.params["release"]
        if _found.get(key) != FAILED:
            _found[key] = outcome
    return report


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
