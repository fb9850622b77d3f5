# SPDX-License-Identifier: Apache-2.0
"""What a scheduler does to requests leaves every layer as it is. Runs with --full."""

import pytest
from serving import Job, Kitchen, Prompt, Served
from test_engine import MIXED, check_attention, check_logits
from twin import Twin

pytestmark = pytest.mark.full

LENGTHS = (1, 5, 127, 128, 129, 300)
WHOLE = Job(
    "lengths",
    tuple((Prompt(length, 2, seed=length),) for length in LENGTHS),
    (("max_num_batched_tokens", 320),),
)
GREEDY = Job("greedy", ((Prompt(5, 32, seed=2),),))
PREFIX = Job(
    "prefix",
    ((Prompt(300, 2, seed=4),), (Prompt(300, 2, seed=4, own_tail=20),)),
    (("enable_prefix_caching", True),),
)
EIGHT = Job("eight", (tuple(Prompt(3 + 2 * i, 3, seed=10 + i) for i in range(8)),))
CROWDED = Job(
    "pre-emption",
    (tuple(Prompt(20, 10, seed=20 + i) for i in range(3)),),
    (("num_gpu_blocks_override", 26), ("max_model_len", 32)),
)
LONG_SPECULATION = Job(
    "long speculation",
    ((Prompt(80, 6, seed=1),),),
    (("speculative_config", {"method": "mtp", "num_speculative_tokens": 1}),),
)
TWO_RANKS = Job(
    "two ranks",
    ((Prompt(5, 4, seed=2),),),
    (("tensor_parallel_size", 2), ("distributed_executor_backend", "mp")),
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


@pytest.mark.serves(WHOLE)
def test_prompts_of_every_length(served: Kitchen, twin: Twin, release: str) -> None:
    result = served.serve(release, WHOLE)
    errors = check_attention(result, twin)
    assert {error.tokens for error in errors} == {n + 1 for n in LENGTHS}
    check_logits(result, twin)


@pytest.mark.serves(GREEDY)
def test_thirty_two_greedy_steps(served: Kitchen, twin: Twin, release: str) -> None:
    result = served.serve(release, GREEDY)
    assert len(result.new_tokens()[0]) == 32
    check_attention(result, twin)
    check_logits(result, twin)


@pytest.mark.serves(PREFIX)
def test_a_cached_prefix(served: Kitchen, twin: Twin, release: str) -> None:
    result = served.serve(release, PREFIX)
    assert min(computed(result, 1)) == 256, "the prefix was not taken from the cache"
    check_attention(result, twin)


@pytest.mark.serves(EIGHT)
def test_eight_at_once(served: Kitchen, twin: Twin, release: str) -> None:
    result = served.serve(release, EIGHT)
    together = max(len(record["rows"]) for record in result.answer["records"])
    assert together >= 7, together
    check_attention(result, twin)


@pytest.mark.serves(CROWDED)
def test_a_request_pushed_out(served: Kitchen, twin: Twin, release: str) -> None:
    result = served.serve(release, CROWDED)
    repeated = [n for n in range(3) if computed(result, n).count(0) > 1]
    assert repeated, "no request was pushed out"
    check_attention(result, twin)


@pytest.mark.serves(LONG_SPECULATION)
def test_speculation_that_chooses(served: Kitchen, twin: Twin, release: str) -> None:
    """With two tokens a step the indexer still sees each token's own entries."""
    check_attention(served.serve(release, LONG_SPECULATION), twin)


@pytest.mark.serves(TWO_RANKS)
def test_two_ranks(served: Kitchen, release: str) -> None:
    whole = served.serve(release, MIXED).new_tokens()[1]
    assert served.serve(release, TWO_RANKS).new_tokens()[0] == whole[:4]
