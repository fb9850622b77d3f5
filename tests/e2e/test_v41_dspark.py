# SPDX-License-Identifier: Apache-2.0
"""DSpark's draft model of V4.1 through the engine: its tokens are those without it, and
its own layers are those of the float32 twin."""

from dataclasses import replace

import pytest
from test_dspark import METHOD, rows_of_steps
from test_v41 import KIND, MIXED, SHORT, TWO_RANKS, TWO_STAGES

from e2e import dspark, v41
from e2e.checks import check_attention, check_experts, check_same_tokens
from e2e.choices import sizes
from e2e.drafts import check_drafts, successors
from e2e.serving import Engines, EngineStopped, Job, Served
from e2e.v41_draft import check_draft
from e2e.v41_draft_twin import V41DraftTwin

pytestmark = pytest.mark.newest

NAME = f"{KIND} with drafts"
STAGED = f"{NAME}, Engram of two stages"


@pytest.fixture(autouse=True)
def release_that_has_it(engines: Engines, release: str) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")


def drafting(job: Job, checkpoint: str) -> Job:
    engine = (*job.engine, ("speculative_config", METHOD))
    return replace(
        job, name=f"{job.name}, drafts", engine=engine, checkpoint=checkpoint
    )


def drafted(
    engines: Engines, release: str, job: Job, plain: Job
) -> tuple[Served, V41DraftTwin]:
    """A job with drafts: its tokens, those that were accepted, and the rows that were
    verified are held to the same prompts without drafts on one device."""
    alone = engines.serve(release, plain)
    known = successors(alone)
    name = f"{NAME}, short" if plain.short else NAME
    engines.add_checkpoint(name, v41.V41(0, known))
    result = engines.serve(release, drafting(job, name))
    check_same_tokens(result, alone)
    steps = rows_of_steps(result)
    assert len(steps) < len(rows_of_steps(alone)), f"no draft was accepted: {steps}"
    check_drafts(result, known.get, dspark.BLOCK)
    twin = engines.twin_of(name)
    assert isinstance(twin, V41DraftTwin)
    check_attention(result, twin)
    check_experts(result, twin)
    return result, twin


@sizes(SHORT, MIXED)
def test_dspark(engines: Engines, release: str, job: Job) -> None:
    check_draft(*drafted(engines, release, job, job))


@pytest.mark.full
@pytest.mark.serves(MIXED)
def test_two_ranks(engines: Engines, release: str) -> None:
    drafted(engines, release, TWO_RANKS, MIXED)


@pytest.mark.full
def test_two_stages(engines: Engines, release: str) -> None:
    """vLLM's model does not pass what the draft reads from stage to stage."""
    engines.add_checkpoint(STAGED, v41.EngramOfTwoStages(0, {}))
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, drafting(TWO_STAGES, STAGED))
    assert "does not support dspark with pipeline parallelism" in str(stopped.value)
