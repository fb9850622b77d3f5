# SPDX-License-Identifier: Apache-2.0
"""What a scheduler does to requests leaves every layer as it is. Runs with --full."""

import pytest

from proof.e2e.judging.checks import (
    check_attention,
    check_experts,
    check_logits,
    check_same_logprobs,
    check_same_tokens,
    logprobs_of,
)
from proof.e2e.judging.verdicts import FLASH, WAVES
from proof.e2e.running.serving import Engines, Job, Prompt, Served
from proof.e2e.twins.twin import Twin

pytestmark = pytest.mark.full

LENGTHS = (1, 5, 2, 9, 127, 128, 129, 300)
LONG = LENGTHS.index(300)
STEPS = 32
BUSY = Job(
    "busy",
    (
        tuple(Prompt(n, STEPS if n == 5 else 3, seed=n) for n in LENGTHS),
        (Prompt(300, 2, seed=300, own_tail=20),),
    ),
    (
        ("enable_prefix_caching", True),
        ("kv_cache_memory_bytes", 64 << 20),
        # The first six, whole; then the next and the head of the longest beside them.
        ("max_num_batched_tokens", sum(LENGTHS[:6])),
    ),
)
CROWDED = Job(
    "pre-emption",
    (tuple(Prompt(20, 14, seed=20 + i) for i in range(3)),),
    # Just enough for the longest; two fit at first, and then they grow.
    (
        ("num_gpu_blocks_override", 23),
        ("max_model_len", 34),
        ("max_num_batched_tokens", 12),
    ),
)
ONE_KIND = Job("one kind of cache", WAVES, (("disable_hybrid_kv_cache_manager", True),))
TWICE = Job(
    "a prompt sent twice, with drafts",
    ((Prompt(330, 1, seed=9),),) * 2,
    (
        ("enable_prefix_caching", True),
        ("kv_cache_memory_bytes", 64 << 20),
        ("max_num_batched_tokens", 330),
        ("speculative_config", {"method": "mtp", "num_speculative_tokens": 1}),
    ),
)


def computed(result: Served, number: int, layer: int = 0) -> list[int]:
    """The positions of a request that were computed, in order, repeats included."""
    found = []
    for record in result.answer["records"]:
        if record["layer"] != layer or record["part"] != "attn":
            continue
        start = 0
        for name, count in record["rows"]:
            if name.partition("-")[0] == str(number):
                found += record["positions"][start : start + count].tolist()
            start += count
    return found


@pytest.mark.serves(BUSY)
def test_eight_prompts_of_every_length(
    engines: Engines, twin: Twin, release: str
) -> None:
    result = engines.serve(release, BUSY)
    steps = [r["rows"] for r in result.answer["records"] if r["layer"] == 0]
    assert max(len(rows) for rows in steps) == len(LENGTHS)
    assert len(result.new_tokens()[LENGTHS.index(5)]) == STEPS
    errors = check_attention(result, twin)
    wanted = {len(p.tokens) + p.new - 1 for p in BUSY.prompts}
    assert {error.tokens for error in errors} == wanted
    check_experts(result, twin)
    check_logits(result, twin)


@pytest.mark.serves(BUSY)
def test_a_cached_prefix(engines: Engines, release: str) -> None:
    """What its layers make of the cached pages is held above, with all the others."""
    result = engines.serve(release, BUSY)
    assert min(computed(result, LONG)) == 0
    assert min(computed(result, len(LENGTHS))) == 256, "the prefix was not cached"


@pytest.mark.serves(TWICE)
def test_a_cached_prefix_with_drafts(engines: Engines, release: str) -> None:
    """The second prompt starts behind the last page that a draft can start from."""
    result = engines.serve(release, TWICE)
    assert min(computed(result, 0)) == 0
    assert min(computed(result, 1)) == 256, "the prefix was not cached"
    check_same_logprobs(logprobs_of(result, 1), logprobs_of(result, 0))


@pytest.mark.serves(CROWDED)
def test_a_request_pushed_out(engines: Engines, twin: Twin, release: str) -> None:
    result = engines.serve(release, CROWDED)
    repeated = [n for n in range(3) if computed(result, n).count(0) > 1]
    assert repeated, "no request was pushed out"
    check_attention(result, twin)
    check_experts(result, twin)
    check_logits(result, twin)


@pytest.mark.newest
@pytest.mark.serves(FLASH, ONE_KIND)
def test_without_the_hybrid_cache_manager(engines: Engines, release: str) -> None:
    found, alone = (engines.serve(release, job) for job in (ONE_KIND, FLASH))
    check_same_tokens(found, alone)
    check_same_logprobs(logprobs_of(found), logprobs_of(alone))
