# SPDX-License-Identifier: Apache-2.0
"""The untouched release beside the patched one, where it starts. Runs with --full."""

import pytest
from comparison import Error, attention_errors
from serving import Job, Kitchen
from test_engine import MIXED, OVERLAP, TIGHT
from test_scenarios import LONG_SPECULATION
from twin import Roundings, Twin

pytestmark = pytest.mark.full

STARTS = ("v0.23.0", "v0.33.0")


def errors_of(
    served: Kitchen, twin: Twin, release: str, job: Job, patched: bool
) -> list[Error]:
    answer = served.serve(release, job, patched).answer
    return attention_errors(answer, twin, Roundings.of(answer["ops"]))


def table(untouched: list[Error], patched: list[Error]) -> list[str]:
    """Markdown rows: untouched, then patched, for each layer of each request."""
    lines = [
        "| tokens | ratio | float32 | rounding twin | core | overlap |",
        "|---|---|---|---|---|---|",
    ]
    for before, after in zip(untouched, patched, strict=True):
        cells = [str(before.tokens), str(before.ratio)]
        for name in ("plain", "rounded", "core"):
            figures = (getattr(error, name) for error in (before, after))
            cells.append(" → ".join(f"{100 * figure:.2f} %" for figure in figures))
        shares = (before.overlap, after.overlap)
        cells.append(" → ".join("-" if x is None else f"{x:.3f}" for x in shares))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


@pytest.mark.parametrize("job", [MIXED, LONG_SPECULATION], ids=lambda job: job.name)
def test_side_by_side(served: Kitchen, twin: Twin, release: str, job: Job) -> None:
    if release not in STARTS:
        with pytest.raises(RuntimeError) as stop:
            served.serve(release, job, patched=False)
        print(f"{release} untouched does not start:\n{stop.value}")
        return
    before = errors_of(served, twin, release, job, patched=False)
    after = errors_of(served, twin, release, job, patched=True)
    print(f"{release} {job.name}")
    print("\n".join(table(before, after)))
    assert max(error.core for error in before) > 5 * TIGHT, "upstream has its sinks"
    assert max(error.core for error in after) <= TIGHT
    shares = [error.overlap for error in after if error.overlap is not None]
    assert min(shares) >= OVERLAP
