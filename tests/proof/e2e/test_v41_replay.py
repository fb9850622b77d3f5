# SPDX-License-Identifier: Apache-2.0
"""V4.1's layers behind the last KV source compute the rows that a prompt's end needs,
and give what they give if they compute all of them.

They own window keys alone. Of the tiny model's two the last one reads a window of the
one before it, and that one a window of each of those rows: `NEEDED` rows for one right
row. Prompts whose own log-probabilities are asked for keep all rows: the others are
held to what these give.
"""

from dataclasses import replace

import pytest
import torch
from test_dspark import METHOD
from test_scenarios import computed
from test_v41 import split

from proof.e2e.checkpoints.v41 import KV_SOURCES, RATIOS, SERVER, Narrow
from proof.e2e.judging.checks import ROUNDED, TIGHT
from proof.e2e.judging.v41_draft import contexts_of
from proof.e2e.running.serving import Engines, Job, Prompt, Served
from proof.e2e.twins.comparison import attention_errors
from proof.e2e.twins.twin import Roundings
from proof.e2e.twins.v41_twin import V41Twin

pytestmark = [pytest.mark.newest, pytest.mark.full]

KIND = "v4.1, windows of 64"
SOURCE = KV_SOURCES[-1]
LAYERS = range(SOURCE, len(RATIOS))
HALO = Narrow.window - 1
"""Rows before it that a window reads."""
NEEDED = Narrow.window + (len(LAYERS) - 2) * HALO
SAME = 1e-3
"""Rows are equal to the last bit where hyper-connections tile both steps alike: of 64
rows at most, or of more."""
LENGTH = 140
ALL_ROWS = (("prompt_logprobs", 0),)


def twice(prompt: Prompt) -> tuple[tuple[Prompt, ...], ...]:
    """The prompt, and with all rows."""
    return (prompt,), (replace(prompt, sampling=ALL_ROWS),)


ONE = Job(
    "v4.1, a prompt's end",
    twice(Prompt(LENGTH, 3, seed=11)),
    (*SERVER, ("max_num_batched_tokens", LENGTH)),
    checkpoint=KIND,
)
FEWER = replace(
    ONE,
    name="v4.1, a row fewer",
    sabotage=True,
    environment=(("E2E_FEWER_ROWS", "1"),),
)
TWO_RANKS, TWO_STAGES = (
    split(f"{name}, a prompt's end", parts, ONE.waves, KIND)
    for name, parts in (
        ("two ranks", "tensor_parallel_size"),
        ("two stages", "pipeline_parallel_size"),
    )
)
"""In chunks of 48."""
BRANCHES = Job(
    "v4.1, a prefix that branches off",
    (
        (Prompt(386, 2, seed=12, own_tail=116),),
        (Prompt(280, 2, seed=12, own_tail=10),),
        *twice(Prompt(350, 2, seed=12, own_tail=80)),
    ),
    (
        *SERVER,
        ("enable_prefix_caching", True),
        ("prefix_cache_retention_interval", 128),
        ("max_num_batched_tokens", 200),
    ),
    checkpoint=KIND,
)
"""270 tokens are shared: two blocks of 128."""
SHARED = 270
NO_HALO = replace(
    BRANCHES,
    name="v4.1, a prefix without its halo",
    waves=(BRANCHES.waves[0], *twice(BRANCHES.waves[1][0])),
    sabotage=True,
)
DRAFTED = 230
DRAFTS = Job(
    "v4.1, a prompt's end, drafts",
    twice(Prompt(DRAFTED, 4, seed=13)),
    (*SERVER, ("max_num_batched_tokens", DRAFTED + 10), ("speculative_config", METHOD)),
    checkpoint=KIND,
)

Rows = dict[int, torch.Tensor]
"""By position."""


def rows_of(result: Served, number: int, layer: int, part: str) -> Rows:
    """What a layer gave to a request."""
    found: Rows = {}
    positions = torch.empty(0)
    for record in result.answer["records"]:
        if record["part"] == "attn":
            positions = record["positions"]
        if (record["part"], record["layer"]) != (part, layer):
            continue
        start = 0
        for request, count in record["rows"]:
            if int(request.partition("-")[0]) == number:
                for row in range(start, start + count):
                    found[int(positions[row])] = record["output"][row]
            start += count
    return found


def read(result: Served, number: int, layer: int = LAYERS[-1]) -> list[int]:
    """The positions of a prompt that a layer computes."""
    length = len(result.read[number])
    return sorted(p for p in rows_of(result, number, layer, "ffn") if p < length)


def apart(
    result: Served, number: int, start: int, end: int | None = None, of: int = -1
) -> float:
    """How far a request's later layers are from those of one that computed all rows,
    the last one, relative, at worst; over the rows up to `end` that must be right if it
    computes them from `start` on."""
    whole, worst = of % len(result.job.prompts), 0.0
    for layer in LAYERS:
        for part in ("attn", "ffn"):
            ours, theirs = (rows_of(result, n, layer, part) for n in (number, whole))
            first = start + (layer - SOURCE) * HALO
            both = [
                p for p in ours.keys() & theirs.keys() if first <= p < (end or p + 1)
            ]
            a, b = (torch.stack([r[p] for p in both]).float() for r in (ours, theirs))
            worst = max(worst, float(((a - b).norm(dim=1) / b.norm(dim=1)).max()))
    print(f"request {number} is {worst:.2e} apart")
    return worst


def alike_up_to(result: Served, number: int, of: int = -1) -> int:
    """The first position of a request at which a layer that has all rows rounds
    otherwise than for the one that computed all rows. What follows it reads that."""
    whole = of % len(result.job.prompts)
    others = [len(result.read[number])]
    for layer in range(SOURCE):
        ours, theirs = (rows_of(result, n, layer, "ffn") for n in (number, whole))
        both = ours.keys() & theirs.keys()
        others += [p for p in both if not torch.equal(ours[p], theirs[p])]
    return min(others)


def check(result: Served) -> None:
    """A prompt leaves later layers its end, and what follows is right."""
    for layer in LAYERS:
        assert read(result, 0, layer) == list(range(LENGTH - NEEDED, LENGTH))
        assert read(result, 1, layer) == list(range(LENGTH))
    tokens = result.new_tokens()
    assert tokens[0] == tokens[1]
    assert apart(result, 0, LENGTH - NEEDED) <= SAME


@pytest.mark.serves(ONE)
def test_a_prompt_leaves_later_layers_its_end(engines: Engines, release: str) -> None:
    result = engines.serve(release, ONE)
    for layer in range(SOURCE):
        assert read(result, 0, layer) == list(range(LENGTH))
    check(result)
    twin = engines.twin_of(KIND)
    assert isinstance(twin, V41Twin)
    twin.look_at(result)
    # Of these few rows float32 is as far as chance will have it.
    for error in attention_errors(result.answer, twin, Roundings.of(result.answer)):
        print(error)
        assert max(error.core, error.output) <= TIGHT and error.rounded <= ROUNDED


@pytest.mark.serves(TWO_RANKS)
def test_two_ranks(engines: Engines, release: str) -> None:
    check(engines.serve(release, TWO_RANKS))


@pytest.mark.serves(TWO_STAGES)
def test_a_stage_that_begins_at_the_source_computes_all_rows(
    engines: Engines, release: str
) -> None:
    result = engines.serve(release, TWO_STAGES)
    assert read(result, 0) == read(result, 1) == list(range(LENGTH))
    tokens = result.new_tokens()
    assert tokens[0] == tokens[1]


@pytest.mark.serves(FEWER)
def test_a_row_fewer_is_seen(engines: Engines, release: str) -> None:
    result = engines.serve(release, FEWER)
    assert len(read(result, 0)) == NEEDED - 1
    assert apart(result, 0, LENGTH - NEEDED) > 5 * SAME


@pytest.mark.serves(BRANCHES)
def test_a_prefix_leaves_a_branch_its_rows(engines: Engines, release: str) -> None:
    """In chunks of 200 tokens, of which those that end too early leave one row. The
    second prompt shares a prefix that lacks rows of later layers, and computes these;
    the third one finds them."""
    result = engines.serve(release, BRANCHES)
    assert [min(computed(result, n)) for n in range(4)] == [0, 128, 256, 0]
    first, branch = 384 - NEEDED, 256 - NEEDED
    assert read(result, 0) == [199, *range(first, 386)]
    assert read(result, 1) == list(range(branch, 280))
    assert read(result, 2) == list(range(256, 350))
    assert apart(result, 1, branch, SHARED) <= SAME
    end = alike_up_to(result, 2)
    assert end >= 256 + 16 and apart(result, 2, 0, end) <= SAME
    tokens = result.new_tokens()
    assert tokens[2] == tokens[3]


@pytest.mark.serves(NO_HALO)
def test_a_prefix_with_fewer_rows_is_seen(engines: Engines, release: str) -> None:
    result = engines.serve(release, NO_HALO)
    assert min(computed(result, 1)) == 256
    assert apart(result, 1, 0, SHARED) > 100 * SAME


@pytest.mark.serves(DRAFTS)
def test_a_draft_needs_no_fewer_rows(engines: Engines, release: str) -> None:
    """A draft reads a window of what the last layer gives: a window's rows more."""
    result = engines.serve(release, DRAFTS)
    start = DRAFTED - NEEDED - HALO
    assert read(result, 0) == list(range(start, DRAFTED))
    assert apart(result, 0, start) <= SAME
    contexts = contexts_of(result)
    ours, theirs = (contexts[name] for name in result.texts)
    wrong = [
        p
        for p in range(DRAFTED)
        if (ours[p] - theirs[p]).norm() > SAME * theirs[p].norm()
    ]
    assert wrong and max(wrong) < DRAFTED - Narrow.window, "the draft's window is wrong"
    tokens = result.new_tokens()
    assert tokens[0] == tokens[1]
