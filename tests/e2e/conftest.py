# SPDX-License-Identifier: Apache-2.0
"""Which releases and scenarios run, and what is printed about them at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from e2e.report import lines_about
from e2e.serving import Engines, Job, opened_engines
from e2e.twin import Twin
from xpustack.base.releases import load
from xpustack.core.cache import Cache
from xpustack.core.project import Project

_open: list[Engines] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--release", action="append", help="serve this release alone (repeatable)"
    )
    parser.addoption(
        "--full", action="store_true", help="every release and every scenario"
    )
    parser.addoption(
        "--write-table",
        action="store_true",
        help="write what the run found to docs/",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "serves(*jobs, untouched): what the test asks of the patched release, and,"
        " given the release, of the untouched one",
    )
    config.addinivalue_line("markers", "full: takes minutes; runs with --full alone")
    config.addinivalue_line("markers", "newest: other releases run with --full alone")
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        options = metafunc.config.option
        pinned = load(Project.find(Path(__file__).parent)).names
        newest = any(metafunc.definition.iter_markers("newest"))
        default = pinned[-1:] if newest else (pinned[0], pinned[-1])
        if options.full:
            default = pinned
        metafunc.parametrize("release", options.release or default, scope="session")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.option.full:
        return
    long = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)


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
    return engines.twin_of("")


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
