# SPDX-License-Identifier: Apache-2.0
"""Every split over ranks gives what one rank gives, layer by layer.

What a cell must be stands in docs/data/ranks.csv, which `--write-table` writes, for the
cells that it ran, from what came out.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from proof.e2e.judging.ranks import FEATURES, SPLITS, Case, Split
from proof.e2e.records import ranks
from proof.e2e.running.serving import Engines
from stack.core.project import Project

SHORT = {("TP 2 x PP 2", "MTP 1")}
"""What runs without --full."""
SIXTEEN = "TP 8 x PP 2"
"""So many processes start once, without drafts."""


def cells(short: bool) -> Iterator[Any]:
    for split in SPLITS:
        for feature in FEATURES:
            if split != SIXTEEN and ((split, feature) in SHORT) == short:
                yield pytest.param(split, feature, id=f"{split}, {feature}")


def begin(engines: Engines, release: str, split: str, feature: str) -> None:
    Case(engines, release, SPLITS[split], feature).begin()


@pytest.fixture
def hold(request: pytest.FixtureRequest, engines: Engines) -> Any:
    """Serves a cell, and compares what comes out with the record."""

    def compare(
        release: str, split: str, feature: str, must_be_known: bool = True
    ) -> None:
        found = Case(engines, release, SPLITS[split], feature).judge()
        cell = ranks.Cell(release, split, feature, found.kind, found.why)
        print(cell)
        project = Project.find(request.path)
        if request.config.option.write_table:
            ranks.keep(project, cell)
            return
        recorded = ranks.recorded(project, cell)
        if recorded == ranks.NOT_TRIED and not must_be_known:
            # Its bounds held; only what is not served must be on record.
            assert found.kind in ("equal", "near tie"), f"{cell} is not on record"
            return
        assert cell.found == recorded, (
            f"{cell}, but {ranks.DATA} has {recorded!r}; if that is right:"
            f" {ranks.COMMAND} --release {release}"
        )

    return compare


@pytest.mark.newest
@pytest.mark.begins(start=begin)
@pytest.mark.parametrize(("split", "feature"), list(cells(short=True)))
def test_ranks(hold: Any, release: str, split: str, feature: str) -> None:
    hold(release, split, feature)


@pytest.mark.full
@pytest.mark.parametrize(("split", "feature"), list(cells(short=False)))
def test_more_ranks(hold: Any, release: str, split: str, feature: str) -> None:
    hold(release, split, feature, must_be_known=False)


@pytest.mark.full
@pytest.mark.newest
def test_sixteen_ranks(hold: Any, release: str) -> None:
    hold(release, SIXTEEN, "plain")


@pytest.mark.full
@pytest.mark.newest
@pytest.mark.parametrize(
    ("ranks", "stages", "feature"),
    [(2, 1, "plain"), (4, 1, "plain"), (8, 1, "plain"), (2, 2, "MTP 1")],
)
def test_ranks_share_rows(
    engines: Engines, release: str, ranks: int, stages: int, feature: str
) -> None:
    """Prompts are too short for the release's own number of rows."""
    if not engines.has_step(release, "indexer-rows"):
        pytest.skip(f"{release} has no setting for the indexer's rows of prefill")
    split = Split(tensor=ranks, stages=stages, rows=2)
    found = Case(engines, release, split, feature).judge()
    print(found)
    assert found.kind in ("equal", "near tie"), found
