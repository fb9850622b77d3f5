# SPDX-License-Identifier: Apache-2.0
"""DSpark's draft model through the engine: its tokens are those without it."""

from dataclasses import replace

import pytest
from test_engine import MIXED

from proof.e2e.checkpoints import dspark
from proof.e2e.judging.checks import check_same_tokens
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.running.choices import sizes
from proof.e2e.running.serving import Engines, Job, Served

NAME = "dspark"
METHOD = {"method": "dspark", "num_speculative_tokens": dspark.BLOCK}
DRAFTING = Job(NAME, MIXED.waves, (("speculative_config", METHOD),), checkpoint=NAME)
SHORT = replace(
    DRAFTING, name=f"{NAME}, short", waves=(MIXED.waves[0][1:],), splits_keys=False
)


def rows_of_steps(served: Served) -> list[list[int]]:
    """Of each step, how many tokens each request brought to the target."""
    return [
        [count for _, count in record["rows"]]
        for record in served.answer["records"]
        if (record["layer"], record["part"]) == (0, "attn")
    ]


@sizes(SHORT, DRAFTING, first=MIXED)
def test_dspark(engines: Engines, release: str, job: Job) -> None:
    if not engines.has_dspark(release):
        pytest.skip(f"{release} has no DSpark for DeepSeek-V4 on XPU")
    plain = engines.serve(release, MIXED)
    known = successors(plain)
    engines.add_checkpoint(NAME, dspark.DSpark(0, known))
    drafted = engines.serve(release, job)
    check_same_tokens(drafted, plain)
    steps = rows_of_steps(drafted)
    whole, longest = len(rows_of_steps(plain)), max(p.new for p in job.prompts)
    without = whole if job is DRAFTING else longest
    assert len(steps) < without, f"no draft was accepted: {steps}"
    check_drafts(drafted, known.get, dspark.BLOCK)
