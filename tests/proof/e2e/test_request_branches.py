# SPDX-License-Identifier: Apache-2.0
"""Each branch of an export serves DeepSeek-V4, and V4.1 where it brings its model.

A branch is its step on the base after the steps that docs/data/requests.csv names, and
nothing else. It serves right, or as the base does: a step that repairs something else
leaves upstream's attention without sinks. By default the branch of V4.1's model, whose
step's own test sees no request of V4; with `--full` all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.e2e.judging.checks import TIGHT, check_same_tokens
from proof.e2e.judging.verdicts import FORMATS, figures
from proof.e2e.running.serving import Engines, Job, opened_engines
from proof.e2e.twins.comparison import attention_errors
from proof.e2e.twins.twin import Roundings
from stack.base.releases import load
from stack.checks.checker import Checker
from stack.core.cache import Cache
from stack.core.project import Project
from stack.series.apply import trees
from stack.series.order import read_order
from stack.upstream.folder import known_needs
from stack.upstream.search import Standings

PROJECT = Project.find(Path(__file__).parent)
RELEASE = load(PROJECT).names[-1]
KNOWN = known_needs(PROJECT.root / "docs/data/requests.csv", RELEASE)
NEEDS = {slug: KNOWN[slug] for slug in read_order(PROJECT, RELEASE) if slug in KNOWN}
V41 = "v41-model"
"""The step that brings V4.1's model."""


@pytest.fixture(scope="module")
def standings() -> Iterator[Standings]:
    with Checker(PROJECT, Cache.default()) as checker:
        series = trees(checker.store, PROJECT, load(PROJECT)[RELEASE])
        found = Standings(checker, series, series.base)
        for slug, needs in NEEDS.items():
            found.take(slug, needs)
        yield found


@pytest.mark.parametrize(
    "slug",
    [
        pytest.param(slug, marks=() if slug == V41 else pytest.mark.full)
        for slug in NEEDS
    ],
)
def test_a_branch_serves(
    standings: Standings, engines: Engines, tmp_path: Path, slug: str
) -> None:
    tree = standings.branch(slug)
    assert tree is not None, f"{slug} does not merge after {', '.join(NEEDS[slug])}"
    brings_v41 = V41 in {applied.slug for applied in tree.applied}
    with opened_engines(tmp_path, Cache.default(), tree) as branch:
        for kind in ("flash", "v4.1") if brings_v41 else ("flash",):
            found = figures(branch, RELEASE, FORMATS[kind])
            print(f"{slug}, {kind}: {found.kind}: {found.why}")
            if found.kind != "serves":
                assert kind == "flash", found.why
                check_as_upstream(branch, engines, FORMATS[kind].job)


def check_as_upstream(branch: Engines, engines: Engines, job: Job) -> None:
    """The base gives these tokens, and no layer of it is nearer to the twin."""
    ours = branch.serve(RELEASE, job)
    theirs = engines.serve(RELEASE, job, patched=False)
    check_same_tokens(ours, theirs)
    twin = engines.twin_of(job.checkpoint)
    errors = [
        attention_errors(served.answer, twin, Roundings.of(served.answer))
        for served in (ours, theirs)
    ]
    for own, upstream in zip(*errors, strict=True):
        assert own.core <= upstream.core + TIGHT, (own, upstream)
        assert own.output <= upstream.output + TIGHT, (own, upstream)
