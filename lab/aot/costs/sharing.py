# SPDX-License-Identifier: Apache-2.0
"""Model what it saves to share work that every rank does today, and what that costs.

A rank then reads, or computes, its part alone, and a collective gives each rank the
others' results. What is saved and what it costs have unrelated constants, so each is
a range of its own: a form wins for certain where its least saving exceeds its highest
cost.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lab.aot.costs.model import ends
from lab.aot.costs.step import (
    NOTHING,
    Kernels,
    Part,
    Range,
    Split,
    all_gather,
    all_reduce,
    constants,
    in_layers,
    operations_per_microsecond,
)
from lab.memory import HEAD, HYPER, INDEX_HEAD, INDEX_HEADS, Group, Model, Shapes

SCORES = "indexer scores"
LEAST_ROWS = 1024
"""From how many rows of prefill on ranks share them, as docs/deploying.md has it."""
BF16, FP32, INT32 = 2, 4, 4
STATES = 2 * 2 * HEAD * FP32, 2 * HEAD * FP32
"""Bytes that a compressor's product gives a token, at ratio 4 and 128."""


@dataclass(frozen=True)
class Shared:
    """One form of sharing, in one step.

    Attributes:
        name: what is shared, and how.
        saved: milliseconds of all layers that a rank no longer spends.
        cost: milliseconds of the collectives that replace them.
    """

    name: str
    saved: Range
    cost: Range

    @property
    def net(self) -> Range:
        """What is left of the saving, at best and at worst. Negative is a loss."""
        return Range(self.saved.slow - self.cost.fast, self.saved.fast - self.cost.slow)

    @property
    def verdict(self) -> str:
        if self.net.slow > 0:
            return "wins"
        return "either" if self.net.fast > 0 else "loses"


def decode(
    model: Model, split: Split, tokens: int, context: int, kernels: Kernels
) -> list[Shared]:
    """Forms for one step with a token of each of `tokens` requests."""
    known = constants()
    others = 1 - 1 / split.ranks
    by4, by128 = STATES
    latents = (model.q_lora + HEAD) * BF16
    index = 4 * INDEX_HEAD * FP32 + INDEX_HEADS * BF16

    def gathered(width: float) -> Range:
        return all_gather(tokens * width, split.ranks, split, known)

    compressors = gathered(by4).times(model.by4) + gathered(by128).times(model.by128)
    in_one = gathered(latents + by4 + index).times(model.by4)
    in_one += gathered(latents + by128).times(model.by128)
    in_one += gathered(latents).times(model.plain)
    mixes = (2 + HYPER) * HYPER * FP32
    scores = in_layers(model, kernels.scores)
    scored = all_reduce(tokens * context // 4 * FP32, split.ranks, split, known)
    # No rank has less than one whole row.
    own = math.ceil(tokens / split.ranks) / tokens
    reading = {
        "compressor": _read(model, split, "compressor"),
        "indexer": _read(model, split, "indexer"),
        "wq_b": _read(model, split, "indexer", dense=True),
        "projections": _read(model, split, "projections"),
        "hyper-connections": _read(model, split, "hyper-connections"),
    }
    inputs = reading["compressor"] + reading["projections"] + reading["indexer"]
    inputs += reading["wq_b"].times(-1)
    sums = all_reduce(tokens * mixes, split.ranks, split, known)
    return [
        Shared(
            "compressors by columns",
            reading["compressor"].times(others),
            compressors.times(1e-3),
        ),
        Shared(
            "all products of a layer's input, one gather",
            inputs.times(others),
            in_one.times(1e-3),
        ),
        Shared(
            "indexer by heads, scores summed",
            # The keys are read as before: at best for the device that is all it does.
            (reading["wq_b"] + Range(0, scores.slow)).times(others),
            scored.times(model.by4 * 1e-3),
        ),
        Shared(
            "indexer scores by rows",
            scores.times(1 - own),
            gathered(model.topk * INT32).times(model.by4 * 1e-3),
        ),
        Shared(
            "hyper-connections by columns, sums",
            reading["hyper-connections"].times(others),
            sums.times(2 * model.layers * 1e-3),
        ),
    ]


def prefill(model: Model, split: Split, tokens: int, kernels: Kernels) -> list[Shared]:
    """Forms for a chunk of `tokens` tokens."""
    known = constants()
    others = 1 - 1 / split.ranks
    by4, by128 = STATES

    def gathered(width: float) -> Range:
        return all_gather(tokens * width, split.ranks, split, known)

    compressors = gathered(by4).times(model.by4) + gathered(by128).times(model.by128)
    scores = in_layers(model, kernels.scores)
    return [
        Shared(
            "compressors by columns",
            _product(model, split, tokens, "compressor").times(others),
            compressors.times(1e-3),
        ),
        Shared(
            "latents by columns",
            _product(model, split, tokens, "projections").times(others),
            gathered((model.q_lora + HEAD) * BF16).times(model.layers * 1e-3),
        ),
        Shared(
            "indexer scores by rows",
            scores.times(others),
            _exchange(model, split, tokens),
        ),
        Shared(
            "the queries of these rows, beside their scores",
            _product(model, split, tokens, "indexer", dense=True).times(others),
            NOTHING,
        ),
    ]


def with_rows_shared(
    parts: Iterable[Part], model: Shapes, split: Split, tokens: int
) -> list[Part]:
    """The parts of a chunk whose rows the ranks share, as steps `indexer-rows` and
    `candidate-row-shares` let them where a user sets `LEAST_ROWS`; as given where there
    is nothing to share. V4.1's ranks project the queries of all rows."""
    if split.ranks == 1 or tokens < LEAST_ROWS:
        return list(parts)
    others = 1 - 1 / split.ranks
    queries = _product(model, split, tokens, "indexer", dense=True)
    shared = []
    for part in parts:
        time = part.milliseconds
        if part.name == SCORES:
            time = time.times(1 - others)
        elif part.name == "indexer, on every rank":
            time += queries.times(-others)
        shared.append(replace(part, milliseconds=time))
    cost = _exchange(model, split, tokens)
    return [*shared, Part("exchange of the indexer's rows", cost, "link")]


def _exchange(model: Shapes, split: Split, tokens: int) -> Range:
    """Milliseconds in which ranks exchange the entries that their rows chose.

    Ranks have different numbers of rows, of which XCCL makes a broadcast of each rank:
    at worst each takes as long as the smallest sum.
    """
    known = constants()
    one = all_gather(tokens * model.topk * INT32, split.ranks, split, known)
    start = all_gather(0, split.ranks, split, known)
    slow = one.slow + (split.ranks - 1) * start.slow
    return in_layers(model, dict.fromkeys(model.scored(0), Range(one.fast, slow)))


def _replicated(model: Shapes, part: str, dense: bool) -> list[Group]:
    return [
        group
        for group in model.stored()
        if group.part == part and not group.sharded and (group.dense or not dense)
    ]


def _read(model: Model, split: Split, part: str, dense: bool = False) -> Range:
    """Milliseconds in which a rank reads what every rank has of a part."""
    size = sum(group.count * group.size for group in _replicated(model, part, dense))
    fast, slow = ends(split.device)
    return Range(
        size / fast.gigabytes_per_second / 1e6, size / slow.gigabytes_per_second / 1e6
    )


def _product(
    model: Shapes, split: Split, tokens: int, part: str, dense: bool = False
) -> Range:
    """Milliseconds in which a rank multiplies a chunk by what every rank has."""
    count = sum(group.count for group in _replicated(model, part, dense))
    peak = operations_per_microsecond(split.device) * 1e3
    fast, slow = constants()["products"]["share"]
    operations = 2 * tokens * count
    return Range(operations / peak / fast, operations / peak / slow)
