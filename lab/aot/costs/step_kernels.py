# SPDX-License-Identifier: Apache-2.0
"""What attention and the indexer take in a step, from their kernels' machine code.

From v0.24.0 on an op of vllm-xpu-kernels computes the indexer's scores by default, of
which no speed is published. So their fast end is what the device can do at best, and
their slow end this stack's Triton kernel.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kernels.xpu_dsv4.indexer._logits import tiles_a_program
from lab.aot.calls import cases_indexer
from lab.aot.calls.record import Launch, recording
from lab.aot.compiler.compile import CompileResult
from lab.aot.costs.model import Device, Estimate, ends, estimate, launched
from lab.aot.costs.modelled import Shape, modelled, record
from lab.aot.costs.step import (
    INDEX_KEY_BYTES,
    Kernels,
    Range,
    operations_per_microsecond,
)
from lab.memory import INDEX_HEAD, WINDOW, Shapes
from stack.core.cache import Cache

Compile = Callable[[Sequence[Launch]], Sequence[CompileResult]]


@dataclass(frozen=True)
class Load:
    """What a rank's attention has to do in one step.

    Attributes:
        op: "decode" or "prefill".
        heads: of the rank.
        tokens: of the step.
        context: tokens before them, of each request.
    """

    op: str
    model: Shapes
    heads: int
    tokens: int
    context: int

    def shapes(self) -> dict[str, Shape]:
        """Calls of attention, by the kind of layer."""
        return {
            kind: Shape(self.op, self.tokens, self.heads, keys + WINDOW)
            for kind, keys in self.model.chosen(self.context).items()
        }

    def scores(self) -> dict[str, "Scores"]:
        """Calls of indexers, by the kind of layer."""
        return {
            kind: Scores(self.op, self.tokens, self.model.index_heads, keys)
            for kind, keys in self.model.scored(self.context).items()
        }


@dataclass(frozen=True)
class Scores:
    """One call of an indexer: its `heads`, and the `keys` that each of `tokens` tokens
    scores, in "decode" or "prefill"."""

    op: str
    tokens: int
    heads: int
    keys: int


def load(op: str, model: Shapes, ranks: int, tokens: int, context: int) -> Load:
    """The load of one of `ranks` tensor-parallel ranks."""
    return Load(op, model, model.heads // ranks, tokens, context)


class Modelled:
    """Kernels of loads on devices, compiled once for all devices of a target."""

    def __init__(
        self, loads: Sequence[Load], cache: Cache, compile_all: Compile
    ) -> None:
        shapes = dict.fromkeys(s for one in loads for s in one.shapes().values())
        calls = dict.fromkeys(s for one in loads for s in one.scores().values())
        scores = {one: _scores_launch(one) for one in calls}
        recorded = record(cache, tuple(shapes))
        launches = [
            launch
            for sides in recorded.values()
            for side in sides.values()
            for launch in side
        ]
        launches += scores.values()
        # In one call, so that several compile at a time.
        code = dict(zip(map(id, launches), compile_all(launches), strict=True))
        self._codes = {
            shape: {
                side: [(launch, code[id(launch)]) for launch in of_side]
                for side, of_side in sides.items()
            }
            for shape, sides in recorded.items()
        }
        self._scores = {
            one: (launch, code[id(launch)]) for one, launch in scores.items()
        }

    def kernels(self, one: Load, device: Device, side: str) -> Kernels:
        """Of this stack ("ours") or of untouched vLLM ("upstream")."""
        return Kernels(
            {
                kind: _range(device, partial(self._attention, shape, side))
                for kind, shape in one.shapes().items()
            },
            {
                kind: self._scores_of(scores, device)
                for kind, scores in one.scores().items()
            },
        )

    def _attention(self, shape: Shape, side: str, device: Device) -> Estimate:
        return modelled(shape, self._codes[shape][side], device)

    def _scores_of(self, one: Scores, device: Device) -> Range:
        launch, code = self._scores[one]
        constants = launch.constexprs()
        tiles = math.ceil(one.keys / constants["BLOCK_N"])
        rows, turns = one.tokens, 1
        if one.op == "prefill":
            turns = constants["BLOCK_M"]
            rows = math.ceil(rows / turns)
        else:
            turns = tiles_a_program(rows)
            tiles = math.ceil(tiles / turns)
        written = 4 * one.tokens * one.keys
        keys = one.keys * (one.tokens if one.op == "decode" else 1)
        traffic = keys * INDEX_KEY_BYTES + written
        operations = 2 * one.tokens * one.keys * one.heads * INDEX_HEAD
        fast, slow = ends(device)
        best = max(
            traffic / fast.gigabytes_per_second / 1e3,
            operations / operations_per_microsecond(device),
        )
        ours = estimate(
            launched(
                code["devices"][device.target],
                rows * tiles,
                launch.num_warps,
                turns,
                traffic,
            ),
            slow,
        )
        return Range(best, max(best, ours.microseconds))


def _scores_launch(one: Scores) -> Launch:
    with recording() as launches:
        if one.op == "decode":
            cases_indexer.paged_logits(one.tokens, 1, heads=one.heads)
        else:
            cases_indexer.logits(one.tokens, max(one.keys, 1), heads=one.heads)
    (launch,) = launches
    return launch


def _range(device: Device, of: Callable[[Device], Estimate]) -> Range:
    fast, slow = ends(device)
    return Range(of(fast).microseconds, of(slow).microseconds)
