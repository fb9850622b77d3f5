# SPDX-License-Identifier: Apache-2.0
"""Serves what the tests ask for, and prints about it at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.e2e.records import twin_errors
from proof.e2e.running.choices import (  # noqa: F401  (pytest finds its hooks here)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
)
from proof.e2e.running.report import lines_about
from proof.e2e.running.serving import Engines, Job, opened_engines
from proof.e2e.twins.twin import Twin
from stack.core.cache import Cache
from stack.core.project import Project

_open: list[Engines] = []


@pytest.fixture(scope="session")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Serves jobs; the checkpoint and the installed trees are made once.

    What the collected tests will ask for starts at once: release by release, the
    longest jobs first, and beside them what other tests begin.
    """
    wanted: list[tuple[str, Job, bool]] = []
    for item in request.session.items:
        asked = item.get_closest_marker("serves")
        if isinstance(item, pytest.Function) and asked:
            release = item.callspec.params["release"]
            untouched = asked.kwargs.get("untouched", lambda release: ())(release)
            wanted += [(release, job, True) for job in asked.args]
            wanted += [(release, job, False) for job in untouched]
    releases = list(dict.fromkeys(release for release, _, _ in wanted))
    # One tree's process serves all its jobs. Upstream's kernels take longer for the
    # same tokens.
    wanted.sort(
        key=lambda order: (releases.index(order[0]), -order[1].tokens, order[2])
    )
    with opened_engines(tmp_path_factory.mktemp("e2e"), Cache.default()) as opened:
        _open.append(opened)
        for release, job, patched in wanted:
            opened.order(release, job, patched)
        for item in request.session.items:
            begins = item.get_closest_marker("begins")
            if isinstance(item, pytest.Function) and begins:
                begins.kwargs["start"](opened, **item.callspec.params)
        yield opened


@pytest.fixture(scope="session")
def twin(engines: Engines) -> Twin:
    """Hugging Face's model in float32."""
    found = engines.twin_of("")
    assert isinstance(found, Twin)
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait last for what was begun at first."""
    session.items.sort(key=lambda item: item.get_closest_marker("begins") is not None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down what the checks found of V4 Vision and V4.1, if no test failed."""
    rows = [
        row
        for opened in _open
        for release, _, served in opened.finished()
        if served.job.checkpoint.startswith(tuple(twin_errors.SECTIONS.values()))
        and not served.job.short
        for row in twin_errors.rows_of(
            release, served.job.checkpoint, served.job.name, served.figures
        )
    ]
    if rows and session.config.option.write_table and not session.testsfailed:
        twin_errors.keep(Project.find(Path(__file__).parent), rows)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each engine executed, and how often."""
    for opened in _open:
        for release, tree, result in opened.finished():
            terminalreporter.section(f"{release} {tree}: {result.job.name}")
            for line in lines_about(result):
                terminalreporter.write_line(line)


def pytest_report_header() -> str:
    return "Hugging Face reference beside proof/e2e/inside/engine.py"
