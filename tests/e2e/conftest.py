# SPDX-License-Identifier: Apache-2.0
"""Serves what the tests ask for, and prints about it at the end."""

from collections.abc import Iterator

import pytest

from e2e.choices import (  # noqa: F401  (pytest finds its hooks here)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
)
from e2e.report import lines_about
from e2e.serving import Engines, Job, opened_engines
from e2e.twin import Twin
from xpustack.core.cache import Cache

_open: list[Engines] = []


@pytest.fixture(scope="session")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Serves jobs; the checkpoint and the installed trees are made once.

    What the collected tests will ask for starts at once: release by release, the
    longest jobs first.
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
        yield opened


@pytest.fixture(scope="session")
def twin(engines: Engines) -> Twin:
    """Hugging Face's model in float32."""
    found = engines.twin_of("")
    assert isinstance(found, Twin)
    return found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each engine executed, and how often."""
    for opened in _open:
        for name, result in opened.finished():
            terminalreporter.section(name)
            for line in lines_about(result):
                terminalreporter.write_line(line)


def pytest_report_header() -> str:
    return "Hugging Face reference beside e2e/engine.py"
