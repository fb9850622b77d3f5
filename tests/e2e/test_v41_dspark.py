# SPDX-License-Identifier: Apache-2.0
"""DSpark's draft model of V4.1 through the engine: its tokens are those without it."""

import pytest
from test_dspark import METHOD, rows_of_steps
from test_v41 import KIND, MIXED

from e2e import dspark, v41
from e2e.checks import check_attention, check_experts, check_same_tokens
from e2e.drafts import check_drafts, successors
from e2e.serving import Engines, Job
from e2e.v41_twin import V41Twin

pytestmark = pytest.mark.newest

NAME = "v4.1 with drafts"
DRAFTING = Job(
    NAME,
    MIXED.waves,
    (*v41.SERVER, ("speculative_config", METHOD)),
    checkpoint=NAME,
)


@pytest.mark.serves(MIXED)
def test_dspark(engines: Engines, release: str) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")
    plain = engines.serve(release, MIXED)
    known = successors(plain)
    engines.add_checkpoint(NAME, v41.V41(0, known))
    drafted = engines.serve(release, DRAFTING)
    check_same_tokens(drafted, plain)
    steps = rows_of_steps(drafted)
    assert len(steps) < len(rows_of_steps(plain)), f"no draft was accepted: {steps}"
    check_drafts(drafted, known.get, dspark.BLOCK)
    twin = engines.twin_of(KIND)
    assert isinstance(twin, V41Twin)
    check_attention(drafted, twin)
    check_experts(drafted, twin)
