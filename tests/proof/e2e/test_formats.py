# SPDX-License-Identifier: Apache-2.0
"""Every published kind of checkpoint, on every release. Runs with --full.

What a cell must be stands in docs/data/checkpoints.csv, which `--write-table` writes,
for the releases that it ran, from what came out.
"""

import pytest

from proof.e2e.judging.verdicts import FORMATS, verdict
from proof.e2e.records import checkpoints
from proof.e2e.running.serving import Engines
from stack.core.project import Project


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.serves(*form.first))
        for name, form in FORMATS.items()
    ],
)
def test_a_kind_of_checkpoint(
    engines: Engines, release: str, name: str, request: pytest.FixtureRequest
) -> None:
    form = FORMATS[name]
    found = verdict(engines, release, form)
    print(f"{release} {name}: {found.kind}: {found.why}")
    cell = checkpoints.Cell(release, name, form.what, found.kind, found.why)
    project = Project.find(request.path)
    if request.config.option.write_table:
        checkpoints.keep(project, cell)
        return
    recorded = checkpoints.recorded(project, release, name)
    assert cell.verdict == recorded.verdict, (
        f"{release}, {form.what}: {found.kind} ({found.why}), but {checkpoints.DATA}"
        f" has {recorded.verdict} ({recorded.why}); if that is right:"
        " pytest tests/proof/e2e"
        f" --full --release {release} -k kind_of_checkpoint --write-table"
    )
    if found.kind == "refuses":
        assert found.why == recorded.why, f"{release}, {form.what}: another message"
