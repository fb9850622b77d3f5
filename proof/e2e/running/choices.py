# SPDX-License-Identifier: Apache-2.0
"""Which releases and scenarios run: hooks that a `conftest.py` imports."""

from pathlib import Path

import pytest
import torch

from proof.e2e.running.serving import Job
from stack.base.releases import load
from stack.core.project import Project


def sizes(few: Job, many: Job, first: Job | None = None) -> pytest.MarkDecorator:
    """Runs a test for a job of few tokens, and with `--full` for one of many as well;
    `first` is what must be served before either."""
    short, long = pytest.mark.serves(first or few), pytest.mark.serves(first or many)
    return pytest.mark.parametrize(
        "job",
        [
            pytest.param(few, marks=short, id="few tokens"),
            pytest.param(many, marks=(pytest.mark.full, long), id="many tokens"),
        ],
    )


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
    config.addinivalue_line(
        "markers",
        "begins(*, start): `start(engines, **parameters)` calls `Engines.begin` for"
        " what takes the test long",
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
