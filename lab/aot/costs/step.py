# SPDX-License-Identifier: Apache-2.0
"""Model a decode step and a prefill chunk of a DeepSeek-V4 on a split: an estimate.

A step is the sum of its parts: bytes of weights that a rank reads, attention and
indexer as `step_kernels` models them from machine code, collectives, and launches.
Nothing overlaps but experts that are copied (`prompts`). Each part has a fast and a
slow end, from the ranges of `devices.toml` and `step.toml`; a sum of ends is an end of
the sum. An eager step waits for the host: at best host and device work at the same
time, at worst one after the other.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.aot.costs.model import Device, ends
from lab.memory import HEAD, HYPER, WINDOW, Shapes

DATA = Path(__file__).parents[1] / "step.toml"
INDEX_KEY_BYTES, PAGED_KEY_BYTES = 132, 584
DPAS_OPERATIONS = 2 * 8 * 16 * 16
"""Operations of one dpas.8x8 of bf16: 8 rows, 16 columns, 16 products."""
LAUNCHES = "launches"
"""The part of a step in which the device waits for the next kernel."""


@dataclass(frozen=True)
class Range:
    """What lies between two ends, in the unit of what holds it.

    Attributes:
        fast: the end that takes less time.
        slow: the end that takes more.
    """

    fast: float
    slow: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.fast + other.fast, self.slow + other.slow)

    def times(self, factor: float) -> "Range":
        return Range(self.fast * factor, self.slow * factor)


NOTHING = Range(0, 0)


@dataclass(frozen=True)
class Split:
    """How a model is spread over devices.

    Attributes:
        device: of every rank.
        ranks: tensor-parallel ranks of a stage.
        stages: pipeline-parallel stages.
        replicas: data-parallel replicas of attention; the experts are spread over the
            ranks of all of them.
        expert_parallel: whether a rank holds whole experts. With replicas it does.
        fullest: layers of the fullest stage, where the cut is not an even one.
    """

    device: Device
    ranks: int
    stages: int = 1
    replicas: int = 1
    expert_parallel: bool = False
    fullest: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "stages", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not 1 or more")

    @property
    def devices(self) -> int:
        return self.ranks * self.stages * self.replicas


@dataclass(frozen=True)
class Kernels:
    """Modelled microseconds of a layer's attention, and of its indexer's scores, by the
    kind of layer."""

    attention: Mapping[str, Range]
    scores: Mapping[str, Range]


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        name: of the part.
        milliseconds: of all layers together.
        bound: what binds it: "DRAM", "dpas", "kernel", "link", "launch" or "host".
    """

    name: str
    milliseconds: Range
    bound: str


def constants() -> dict[str, Any]:
    """What `step.toml` says."""
    return tomllib.loads(DATA.read_text())


def total(parts: Iterable[Part]) -> Range:
    """Milliseconds of all parts, one after the other."""
    return sum((part.milliseconds for part in parts), NOTHING)


def distinct(experts: int, active: int, tokens: int) -> float:
    """Experts that at least one of `tokens` chooses, if each chooses at random."""
    return experts * (1 - (1 - active / experts) ** tokens)


def decode(model: Shapes, split: Split, requests: int, kernels: Kernels) -> list[Part]:
    """The parts of one step in which each of `requests` requests gets one token.

    Args:
        requests: of one replica that are in the step together.
        kernels: of `requests` tokens at the step's context.
    """
    known = constants()
    parts = _weights(model, split, requests)
    parts += _attention(model, kernels)
    walk = _range(known["experts"]["microseconds"]).times(1e-3 * model.layers)
    parts.append(Part("experts, fixed cost", walk, "kernel"))
    parts.append(_hyper(model, split, requests))
    parts.append(_collectives(model, split, requests, known))
    parts.append(Part(LAUNCHES, _of_launches(model, "device_launch"), "launch"))
    return parts


def host(model: Shapes) -> Range:
    """Milliseconds in which the host launches an eager decode step."""
    return _of_launches(model, "host_launch")


def _of_launches(model: Shapes, cost: str) -> Range:
    """Milliseconds of a decode step's launches, at the constant `cost` for each."""
    one, count = _range(constants()[cost]["microseconds"]), launches(model)
    return Range(one.fast * count.fast, one.slow * count.slow).times(1e-3)


def eager(device: Range, of_host: Range) -> Range:
    """A step without graphs, from its time on the device and on the host."""
    return Range(max(device.fast, of_host.fast), device.slow + of_host.slow)


def launches(model: Shapes) -> Range:
    """Kernels that a rank launches in a decode step."""
    known = constants()["launches"]
    of_kinds = [
        _range(known[model.family][kind]).times(count)
        for kind, count in (model.kinds | model.parts).items()
    ]
    experts = _range(known[model.family]["experts"]).times(model.layers)
    return sum(of_kinds, experts)


def prefill(
    model: Shapes, split: Split, tokens: int, context: int, kernels: Kernels
) -> list[Part]:
    """The parts of one chunk of `tokens` tokens behind `context` others, eager.

    Args:
        kernels: of `tokens` queries at that context.
    """
    known = constants()
    products = _multiplied(model, split, tokens, _range(known["products"]["share"]))
    parts = []
    for part in _weights(model, split, tokens):
        time = products[part.name]
        longer = time.slow > part.milliseconds.slow
        parts.append(Part(part.name, time, "dpas") if longer else part)
    parts += _attention(model, kernels)
    parts.append(_gather(model, split, tokens, context))
    parts.append(_hyper(model, split, tokens))
    parts.append(_collectives(model, split, tokens, known))
    return parts


def operations_per_microsecond(device: Device) -> float:
    """Peak of the matrix engines in bf16."""
    engines = device.xe_cores * device.vector_engines
    return engines * DPAS_OPERATIONS / device.dpas_clocks * device.gigahertz * 1e3


def tokens_per_second(model: Shapes, split: Split, requests: int, step: Range) -> Range:
    """Of a server that has `requests` requests, over all its replicas.

    Stages work on different requests at the same time, at best as many parts of the
    batch as there are stages; the fullest stage sets the pace.

    Args:
        step: milliseconds of one such part through all stages.
    """
    parts = min(split.stages, -(-requests // split.replicas))
    fullest = (split.fullest or -(-model.layers // split.stages)) / model.layers
    fast, slow = (
        1e3 * requests / max(time, parts * time * fullest)
        for time in (step.fast, step.slow)
    )
    return Range(fast, slow)


def together(split: Split, requests: int) -> int:
    """Requests of one replica that are in a step together, if the server has
    `requests` and each stage works on another part of them."""
    return -(-requests // (split.stages * split.replicas))


@dataclass(frozen=True)
class _Stored:
    """Weights that one rank reads in a step.

    Attributes:
        part: of the model.
        count: weights that each token is multiplied with.
        size: bytes that are read.
    """

    part: str
    count: float
    size: Range


def _stored(model: Shapes, split: Split, tokens: int) -> list[_Stored]:
    """What a rank reads once in a step, by part of the model.

    Not read: the embedding and the table of hashed routes, of which a step needs a few
    rows, and experts that no token chooses.
    """
    found = [_experts(model, split, tokens)]
    for group in model.stored():
        if group.part in ("embedding", "route table", "experts"):
            continue
        small = group.part in ("norms", "sinks", "router")
        name = "small weights" if small else group.part
        count = group.count / (split.ranks if group.sharded else 1)
        if group.part == "shared expert":
            count *= model.padded(split.ranks)
        size = count * group.size
        found.append(
            _Stored(
                name if group.sharded or small else f"{name}, on every rank",
                # Of a chunk, the head computes the last token of each request alone.
                0 if group.part == "head" else count,
                Range(size, size),
            )
        )
    return found


def _weights(model: Shapes, split: Split, tokens: int) -> list[Part]:
    """Reading the weights: DRAM binds."""
    times: dict[str, Range] = {}
    for stored in _stored(model, split, tokens):
        time = _moved(stored.size, split.device)
        times[stored.part] = times.get(stored.part, NOTHING) + time
    return [Part(name, time, "DRAM") for name, time in times.items()]


def _experts(model: Shapes, split: Split, tokens: int) -> _Stored:
    """The chosen experts; with whole experts on a rank, the fullest rank ends last."""
    everyone = split.ranks * split.replicas
    stored = next(group for group in model.stored() if group.part == "experts")
    one = stored.count * stored.size / model.experts
    tokens *= split.replicas
    mean = distinct(model.experts, model.active, tokens) / everyone
    most = mean
    if split.replicas > 1 or split.expert_parallel:
        most = min(mean + 2 * math.sqrt(mean), model.experts / everyone)
    else:
        one *= model.padded(split.ranks)
    count = stored.count * model.active / model.experts / everyone * split.replicas
    return _Stored("experts", count, Range(mean * one, most * one))


def _attention(model: Shapes, kernels: Kernels) -> list[Part]:
    return [
        Part(name, in_layers(model, of_kinds), "kernel")
        for name, of_kinds in (
            ("attention", kernels.attention),
            ("indexer scores", kernels.scores),
        )
    ]


def in_layers(model: Shapes, of_kinds: Mapping[str, Range]) -> Range:
    """Milliseconds of all layers, from microseconds of one of each kind."""
    times = [time.times(model.kinds[kind]) for kind, time in of_kinds.items()]
    return sum(times, NOTHING).times(1e-3)


def _gather(model: Shapes, split: Split, tokens: int, context: int) -> Part:
    """A chunk's attention reads keys that were copied from their pages into bf16."""
    entries = model.entries(context + tokens)
    compressed = sum(model.kinds[kind] * count for kind, count in entries.items())
    rows = compressed + model.layers * (min(WINDOW, context) + tokens)
    size = rows * (PAGED_KEY_BYTES + 2 * HEAD)
    return Part("gather", _moved(Range(size, size), split.device), "DRAM")


def _hyper(model: Shapes, split: Split, tokens: int) -> Part:
    """Each sublayer reads and writes the streams of its tokens, in bf16."""
    size = 2 * model.layers * tokens * HYPER * model.hidden * 2 * 2
    return Part("hyper-connections", _moved(Range(size, size), split.device), "DRAM")


def _collectives(
    model: Shapes, split: Split, tokens: int, known: Mapping[str, Any]
) -> Part:
    """Two sums a layer over the ranks, or with replicas the exchange with the experts'
    ranks; and the streams that go to the next stage."""
    width = 2 * model.hidden
    time = NOTHING
    if split.ranks > 1:
        sums = model.layers * (2 if split.replicas == 1 else 1)
        time += all_reduce(tokens * width, split.ranks, split, known).times(sums)
        for count, values in model.gathers:
            one = all_gather(2 * tokens * values, split.ranks, split, known)
            time += one.times(count)
    if split.replicas > 1:
        everyone = split.ranks * split.replicas
        size = tokens * split.replicas * width
        time += all_reduce(size, everyone, split, known).times(model.layers)
    hop = all_reduce(tokens * HYPER * width, 2, split, known)
    time += hop.times(split.stages - 1)
    return Part("collectives", time.times(1e-3), "link")


def all_reduce(
    size: float, ranks: int, split: Split, known: Mapping[str, Any]
) -> Range:
    """Microseconds to add up `size` bytes over `ranks` devices."""
    return _collective(size, ranks, split, known, passes=2)


def all_gather(
    size: float, ranks: int, split: Split, known: Mapping[str, Any]
) -> Range:
    """Microseconds until each of `ranks` devices has all `size` bytes, of which each
    had its part. Of a gather alone no time is published: up to the table's last size
    it takes what a sum does, above that the link moves half as much."""
    return _collective(size, ranks, split, known, passes=1)


def _collective(
    size: float, ranks: int, split: Split, known: Mapping[str, Any], passes: int
) -> Range:
    link = _range(known["link"][split.device.name])
    fast, slow = (
        _time(points, size, passes * (ranks - 1) / ranks / gigabytes_per_second / 1e3)
        for points, gigabytes_per_second in (
            (known["all_reduce"]["fast"], link.fast),
            (known["all_reduce"]["slow"], link.slow),
        )
    )
    return Range(fast, slow)


def _time(points: list[list[float]], size: float, byte_above: float) -> float:
    """Microseconds for `size` bytes, by two `points` and the time of a byte above."""
    (small, least), (large, most) = points
    if size <= small:
        return least
    if size <= large:
        along = math.log(size / small) / math.log(large / small)
        return least * math.pow(most / least, along)
    return most + (size - large) * byte_above


def _multiplied(
    model: Shapes, split: Split, tokens: int, share: Range
) -> dict[str, Range]:
    """Milliseconds of the products of a chunk, by part: the matrix engines bind."""
    peak = operations_per_microsecond(split.device) * 1e3
    times: dict[str, Range] = {}
    for stored in _stored(model, split, tokens):
        operations = 2 * tokens * stored.count
        time = Range(operations / peak / share.fast, operations / peak / share.slow)
        times[stored.part] = times.get(stored.part, NOTHING) + time
    return times


def _moved(size: Range, device: Device) -> Range:
    """Milliseconds to move `size` bytes from or to DRAM."""
    fast, slow = ends(device)
    return Range(
        size.fast / fast.gigabytes_per_second / 1e6,
        size.slow / slow.gigabytes_per_second / 1e6,
    )


def _range(pair: list[float]) -> Range:
    fast, slow = pair
    return Range(fast, slow)
