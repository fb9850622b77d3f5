# SPDX-License-Identifier: Apache-2.0
"""The untouched release beside the patched one, where it starts. Runs with --full."""

from collections.abc import Iterator
from itertools import zip_longest

import pytest
from test_engine import MIXED, SPECULATING

from proof.e2e.judging.checks import OVERLAP, TIGHT
from proof.e2e.records import engine_errors
from proof.e2e.running.serving import Engines, Job
from proof.e2e.twins.comparison import Error, attention_errors
from proof.e2e.twins.twin import Roundings, Twin
from stack.core.markdown import table
from stack.core.project import Project

pytestmark = pytest.mark.full

STOPS = {
    "v0.22.1": (MIXED, "DeepseekV4 attention requires a CUDA device"),
}
"""The first job that an untouched release cannot serve, and how its trace ends."""

HEADS = {
    "plain": "float32 %",
    "core": "core %",
    "output": "output %",
    "overlap": "overlap",
}
"""Columns of `docs/data/e2e.csv` by the figure's name."""


def startable(release: str) -> Iterator[Job]:
    """What is asked of an untouched release: all up to the first that stops it."""
    stop, _ = STOPS.get(release, (None, ""))
    for job in (MIXED, SPECULATING):
        yield job
        if job is stop:
            return


def errors_of(
    engines: Engines, twin: Twin, release: str, job: Job, patched: bool
) -> list[Error]:
    answer = engines.serve(release, job, patched).answer
    return attention_errors(answer, twin, Roundings.of(answer))


def side_by_side(untouched: list[Error], patched: list[Error]) -> str:
    """A Markdown table: untouched, then patched, for each layer of each request."""
    rows = []
    for before, after in zip(untouched, patched, strict=True):
        cells = [str(before.tokens), str(before.ratio)]
        for name in ("plain", "rounded", "core", "output"):
            figures = (getattr(error, name) for error in (before, after))
            cells.append(" → ".join(f"{100 * figure:.2f} %" for figure in figures))
        shares = (before.overlap, after.overlap)
        cells.append(" → ".join("-" if x is None else f"{x:.3f}" for x in shares))
        rows.append(cells)
    heads = ("tokens", "ratio", "float32", "rounding twin", "core", "output", "overlap")
    return table(heads, rows)


def record(
    release: str, untouched: list[Error], patched: list[Error]
) -> Iterator[dict[str, object]]:
    """The rows of `docs/data/e2e.csv`: errors in percent, the overlap as a share."""
    for before, after in zip_longest(untouched, patched):
        sides = dict(zip(engine_errors.SIDES, (before, after), strict=True))
        yield {
            "release": release,
            "tokens": after.tokens,
            "ratio": after.ratio,
            **{
                f"{head}, {side}": cell(error, name)
                for name, head in HEADS.items()
                for side, error in sides.items()
            },
        }


def cell(error: Error | None, name: str) -> str:
    figure = getattr(error, name, None)
    if figure is None:
        return ""
    return f"{figure:.3f}" if name == "overlap" else f"{100 * figure:.2f}"


@pytest.mark.serves(MIXED, SPECULATING, untouched=startable)
def test_side_by_side(
    engines: Engines, twin: Twin, release: str, request: pytest.FixtureRequest
) -> None:
    impossible, trace = STOPS.get(release, (None, ""))
    for job in startable(release):
        stops = job is impossible
        before = [] if stops else errors_of(engines, twin, release, job, patched=False)
        after = errors_of(engines, twin, release, job, patched=True)
        if job is MIXED and request.config.option.write_table:
            rows = list(record(release, before, after))
            engine_errors.keep(Project.find(request.path), release, rows)
        if stops:
            with pytest.raises(RuntimeError, match=trace) as stop:
                engines.serve(release, job, patched=False)
            print(f"{release} untouched stops at {job.name}:\n{stop.value}")
            return
        print(f"{release} {job.name}")
        print(side_by_side(before, after))
        for patched in (False, True):
            tokens = engines.serve(release, job, patched).new_tokens()
            print("patched:" if patched else "untouched:", tokens)
        sinks = max(error.core for error in before)
        assert sinks > 5 * TIGHT, "upstream has its sinks"
        assert max(error.core for error in after) <= TIGHT
        shares = [error.overlap for error in after if error.overlap is not None]
        assert min(shares) >= OVERLAP
