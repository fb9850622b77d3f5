# SPDX-License-Identifier: Apache-2.0
"""The option `--device`, and where kernels ran as a run's first and last line."""

from pathlib import Path

import pytest
from device_choice import KINDS, RAN, described


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=KINDS,
        help="where kernels run: a GPU of that kind, or Triton's repaired interpreter",
    )
    parser.addoption(
        "--rows",
        type=Path,
        help="with --device lowered: write each launch as a row of this CSV file",
    )
    parser.addoption(
        "--as-a-user",
        action="store_true",
        help="run also those blocks of the pages that take minutes, as a clean user",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    return described(config) or None


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """As in the header: a reader of the log's end sees it, too."""
    ran = config.stash.get(RAN, None)
    if ran:
        terminalreporter.section("executed through Intel's lowering")
        for launch in ran:
            terminalreporter.write_line(str(launch))
        if rows := config.getoption("--rows"):
            from stack.base.releases import load
            from stack.core.project import Project
            from stack.core.rows import csv_text
            from stack.pages.made import stamp

            project = Project(config.rootpath)
            release = load(project).names[-1]
            made = stamp(project, release)
            found = [
                {"release": release, "number": number, **launch.row(), **made}
                for number, launch in enumerate(ran, 1)
            ]
            rows.write_text(csv_text(found))
    if line := described(config):
        terminalreporter.write_line(line)
