# SPDX-License-Identifier: Apache-2.0
"""`xpustack defects`."""

import dataclasses
from typing import Annotated, Any

import typer

from xpustack import defects as core
from xpustack.cache import Cache
from xpustack.console import (
    AsJson,
    Offline,
    print_rows,
    reporting_errors,
    showing_progress,
)
from xpustack.project import Project
from xpustack.series import load_series


def defects(
    write: Annotated[
        bool, typer.Option("--write", help=f"Refresh the tables in {core.PAGE}.")
    ] = False,
    compare: Annotated[
        tuple[str, str], typer.Option(help="Two releases whose patches to compare.")
    ] = ("v0.23.0", "v0.33.0"),
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Show each defect of upstream: what the tests found before a step and after it.

    The figures are those that `xpustack check` stored; a step that was not checked
    as it is now has none."""
    with reporting_errors(as_json), showing_progress() as progress:
        project = Project.find()
        found = core.rows(project, Cache.default(), offline=offline, progress=progress)
        series = [load_series(project, name) for name in compare]
        alike = core.alike(*series)
        if write:
            section = core.markdown(found, alike, " and ".join(compare))
            core.write(project, section)
    rows: list[dict[str, Any]] = [
        {
            "defect": row.defect.id,
            "release": row.release,
            "before": row.before,
            "after": row.after,
        }
        for row in found
    ]
    data = {"defects": rows, "alike": [dataclasses.asdict(one) for one in alike]}
    print_rows(as_json, data, rows, ("defect", "release", "before", "after"))
