# SPDX-License-Identifier: Apache-2.0
"""`xpustack defects`: what the tests observe of upstream's defects."""

from xpustack.pages import defects as page
from xpustack.terminal.console import (
    Offline,
    Reply,
    working,
)


def defects(*, write: bool = False, offline: Offline = False, answer: Reply) -> None:
    """Show each defect of upstream: what the tests found before a step and after it.

    The figures are those that `xpustack check` stored; a step that was not checked
    as it is now has none. --write keeps those that the file has of such a step.

    Args:
        write: Refresh docs/defects.md and docs/data/defects.csv.
    """
    with working(offline) as (project, cache):
        observed = page.observations(project, cache)
        if write:
            page.write(project, observed)
    rows = [
        {
            "defect": row.id,
            "release": row.release,
            "before": row.before,
            "after": row.after,
        }
        for row in observed
    ]
    answer.data = {"defects": rows}
    answer.table(rows, ("defect", "release", "before", "after"))
