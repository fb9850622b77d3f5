# SPDX-License-Identifier: Apache-2.0
"""V4.1's layers behind the last KV source compute the rows that a prompt's end needs,
and give what they give if they compute all of them.

They own window keys alone. Of the tiny model's two the last one needs a window of the
one before it, and that one a window of each of those rows: `NEEDED` rows for one right
row. Prompts whose own log-probabilities are asked for keep all rows: what they give is
what the others are held to.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_dspark import METHOD
from test_scenarios import computed
from test_v41 import KIND, split

from e2e import v41
from e2e.checkpoint import WINDOW
from e2e.serving import Engines, Job, Prompt, Served
from e2e.v41 import KV_SOURCES, RATIOS, SERVER
from e2e.v41_draft import contexts_of

pytestmark = [pytest.mark.newest, pytest.mark.full]

SOURCE = KV_SOURCES[-1]
LAYERS = range(SOURCE, len(RATIOS))
HALO = WINDOW - 1
"""Rows before it that a window reads."""
NEEDED = WINDOW + (len(LAYERS) - 2) * HALO
LENGTH = 300
PLAIN = Prompt(LENGTH, 3, seed=11)
ALL_ROWS = (("prompt_logprobs", 0),)


def twice(prompt: Prompt) -> tuple[tuple[Prompt, ...], ...]:
    """The prompt, and with all rows."""
    return (prompt,), (replace(prompt, sampling=ALL_ROWS),)


ONE = Job(
    "v4.1, a long prompt",
    twice(PLAIN),
    (*SERVER, ("max_num_batched_tokens", LENGTH)),
    checkpoint=KIND,
)
FEWER = replace(
    ONE,
    name="v4.1, a row fewer",
    sabotage=True,
    environment=(("E2E_FEWER_ROWS", "1"),),
)
BRANCHES = Job(
    "v4.1, a prefix that branches",
    (
        (Prompt(530, 2, seed=12, own_tail=130),),
        (Prompt(410, 2, seed=12, own_tail=10),),
        (Prompt(412, 2, seed=12, own_tail=12),),
        (Prompt(412, 2, seed=12, own_tail=12, sampling=ALL_ROWS),),
    ),
    (*SERVER, ("enable_prefix_caching", True), ("max_num_batched_tokens", 200)),
    checkpoint=KIND,
)
"""400 tokens are shared: three blocks of 128."""
NO_HALO = replace(BRANCHES, name="v4.1, a prefix without its halo", sabotage=True)
TWO_RANKS = replace(
    split("two ranks, a long prompt", "tensor_parallel_size", ONE.waves),
)
TWO_STAGES = split("two stages, a long prompt", "pipeline_parallel_size", ONE.waves)

SAME = 1e-6

Rows = dict[int, torch.Tensor]
"""By position."""


def rows_of(result: Served, number: int, layer: int, part: str) -> list[Rows]:
    """What a layer gave to a request in each step."""
    found, positions = [], torch.empty(0)
    for record in result.answer["records"]:
        if record["part"] == "attn":
            positions = record["positions"]
        if (record["part"], record["layer"]) != (part, layer):
            continue
        start, step = 0, {}
        for request, count in record["rows"]:
            if int(request.partition("-")[0]) == number:
                own = range(start, start + count)
                step |= {int(positions[n]): record["output"][n] for n in own}
            start += count
        found.append(step)
    return [step for step in found if step]


def apart(
    result: Served, number: int, whole: int, start: int, end: int | None = None
) -> float:
    """How far a request's layers are from those of another one that computed all rows,
    relative, at worst; over the rows up to `end` that must be right if it computed them
    from `start` on."""
    worst = 0.0
    for layer in LAYERS:
        for part in ("attn", "ffn"):
            ours, theirs = (
                {
                    p: row
                    for step in rows_of(result, n, layer, part)
                    for p, row in step.items()
                }
                for n in (number, whole)
            )
            first = start + (layer - SOURCE) * HALO
            both = [
                p for p in ours.keys() & theirs.keys() if first <= p < (end or p + 1)
            ]
            assert both, (layer, part)
            a, b = (
                torch.stack([rows[p] for p in both]).float() for rows in (ours, theirs)
            )
            worst = max(worst, float(((a - b).norm(dim=1) / b.norm(dim=1)).max()))
    return worst


def check_one(result: Served) -> None:
    """A prompt leaves later layers its end, and all that follows is right."""
    for layer in LAYERS:
        assert len(rows_of(result, 0, layer, "ffn")[0]) == NEEDED
        assert len(rows_of(result, 1, layer, "ffn")[0]) == LENGTH
    tokens = result.new_tokens()
    assert tokens[0] == tokens[1]
    found = apart(result, 0, 1, LENGTH - NEEDED)
    print(f"{NEEDED} rows of {LENGTH}: {found} apart from all")
    assert found <= SAME


@pytest.mark.serves(ONE)
def test_a_prompt_leaves_later_layers_its_end(engines: Engines, release: str) -> None:
    result = engines.serve(release, ONE)
    for layer in range(SOURCE):
        assert len(rows_of(result, 0, layer, "ffn")[0]) == LENGTH
    check_one(result)


@pytest.mark.serves(FEWER)
def test_a_row_fewer_is_seen(engines: Engines, release: str) -> None:
    result = engines.serve(release, FEWER)
    assert len(rows_of(result, 0, SOURCE, "ffn")[0]) == NEEDED - 1
    assert apart(result, 0, 1, LENGTH - NEEDED) > 100 * SAME


@pytest.mark.serves(TWO_RANKS, TWO_STAGES)
@pytest.mark.parametrize("job", [TWO_RANKS, TWO_STAGES], ids=lambda job: job.name)
def test_two_devices(engines: Engines, release: str, job: Job) -> None:
    check_one(engines.serve(release, job))


@pytest.mark.serves(BRANCHES)
def test_prefixes(engines: Engines, release: str) -> None:
    """In chunks of 200 tokens. The second prompt shares a prefix that lacks rows of
    later layers, and computes these; the third one finds them."""
    result = engines.serve(release, BRANCHES)
    assert [min(computed(result, n)) for n in range(4)] == [0, 128, 384, 0]
    starts = [
        min(p for step in rows_of(result, n, SOURCE, "ffn") for p in step if p > 199)
        for n in range(4)
    ]
    print(starts)
    counts = [
        [len(step) for step in rows_of(result, n, len(RATIOS) - 1, "ffn")]
        for n in range(4)
    ]
    print(counts)
    for number, start in ((0, 512 - NEEDED), (1, 384 - NEEDED), (2, 0)):
        found = apart(result, number, 3, start, 400 if number < 2 else None)
        print(number, found)
        assert found <= SAME
    assert result.new_tokens()[2] == result.new_tokens()[3]


@pytest.mark.serves(NO_HALO)
def test_a_prefix_without_its_halo_is_seen(engines: Engines, release: str) -> None:
    result = engines.serve(release, NO_HALO)
    assert min(computed(result, 1)) == 384
    assert apart(result, 1, 3, 0, 400) > 100 * SAME


def test_drafts(engines: Engines, release: str) -> None:
    """The draft reads a window of what the last layer gives."""
    name = f"{KIND} with drafts, a long prompt"
    engines.add_checkpoint(name, v41.V41(0, {}))
    length = 400
    engine: tuple[tuple[str, Any], ...] = (
        *SERVER,
        ("max_num_batched_tokens", length + 8),
        ("speculative_config", METHOD),
    )
    job = Job(name, twice(Prompt(length, 4, seed=13)), engine, checkpoint=name)
    result = engines.serve(release, job)
    tokens = result.new_tokens()
    assert tokens[0] == tokens[1]
    assert len(rows_of(result, 0, SOURCE, "ffn")[0]) == NEEDED + HALO
    assert apart(result, 0, 1, length - NEEDED - HALO) <= SAME
    ours, theirs = (
        contexts_of(result)[
            next(t for t in result.texts if t.startswith(f"{n}-") or t == str(n))
        ]
        for n in (0, 1)
    )
    for position in range(length - WINDOW, length):
        assert torch.equal(ours[position], theirs[position]), position
    different = [
        p for p in range(length - WINDOW) if not torch.equal(ours[p], theirs[p])
    ]
    assert different, "all rows were computed"
