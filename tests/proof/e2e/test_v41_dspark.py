# SPDX-License-Identifier: Apache-2.0
"""DSpark's draft model of V4.1 through the engine: its tokens are those without it, and
its own layers are those of the float32 twin."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from test_dspark import METHOD, rows_of_steps
from test_v41 import AS_PUBLISHED, KIND, MIXED, SHORT, TWO_RANKS

from proof.e2e.checkpoints import dspark, v41
from proof.e2e.judging.checks import check_attention, check_experts, check_same_tokens
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.judging.v41_draft import check_draft
from proof.e2e.running.choices import sizes
from proof.e2e.running.serving import Engines, EngineStopped, Job, Served
from proof.e2e.twins.v41_draft_twin import V41DraftTwin

pytestmark = pytest.mark.newest

NAME = f"{KIND} with drafts"


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
@pytest.mark.serves(SHORT)
@pytest.mark.parametrize("targets", [(3, 4, 5), (4, 5), (1, 2, 5)], ids=str)
def test_two_stages(engines: Engines, release: str, targets: tuple[int, ...]) -> None:
    """The second begins at layer 3: what the draft reads of the layers up to it is sent
    there, and nothing of those behind it."""
    plain = engines.serve(release, SHORT)
    known = successors(plain)
    name = f"{NAME}, targets {targets}"
    writer = type("Targets", (v41.V41,), {"target_layers": targets})
    engines.add_checkpoint(name, writer(0, known))
    one = drafting(replace(SHORT, name=f"v4.1, short, {targets}"), name)
    two = replace(AS_PUBLISHED, name=f"v4.1, two stages, {targets}", waves=SHORT.waves)
    alone, staged = (engines.serve(release, job) for job in (one, drafting(two, name)))
    check_same_tokens(staged, plain)
    assert staged.answer["drafts"] == alone.answer["drafts"]
    check_attention(staged, engines.twin_of(name))


class Five(v41.V41):
    """Its draft has five tokens."""

    def described(self) -> dict[str, Any]:
        return super().described() | {"dspark_block_size": 5}


@pytest.mark.full
@pytest.mark.serves(SHORT)
def test_five_drafts_that_are_rejected(engines: Engines, release: str) -> None:
    """The target reads more drafts than the text has tokens left."""
    name = f"{NAME}, five"
    engines.add_checkpoint(name, Five(0, {}))
    five = {"method": "dspark", "num_speculative_tokens": 5}
    engine = (*SHORT.engine, ("speculative_config", five))
    job = replace(SHORT, name=name, engine=engine, checkpoint=name)
    result = engines.serve(release, job)
    check_same_tokens(result, engines.serve(release, SHORT))
    assert result.answer["drafts"]["accepted"] == 0
    twin = engines.twin_of(name)
    assert isinstance(twin, V41DraftTwin)
    check_attention(result, twin)
    check_experts(result, twin)
    check_draft(result, twin)


@pytest.mark.full
def test_the_advice_for_drafts_starts(engines: Engines, release: str) -> None:
    engines.add_checkpoint(f"{NAME}, advised", v41.V41(0, {}))
    job = drafting(replace(SHORT, name="v4.1, n-grams"), f"{NAME}, advised")
    engine = dict(job.engine)
    engine["speculative_config"] = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 3,
    }
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, replace(job, engine=tuple(engine.items())))
    (advice,) = set(re.findall(r"--speculative-config '(\{.*?\})'", str(stopped.value)))
    engine["speculative_config"] = json.loads(advice)
    name = "v4.1, drafts as advised"
    engines.serve(release, replace(job, name=name, engine=tuple(engine.items())))
