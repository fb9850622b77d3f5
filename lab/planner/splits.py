# SPDX-License-Identifier: Apache-2.0
"""Which splits of a model over devices a release may start, and which cannot be; and by
arithmetic, on how few devices one could carry a load.

The arithmetic leaves out what only a start knows, so it promises too much rather than
too little: it says which splits are worth a start, never that one fails.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from lab.memory import GIB, INDEX_HEAD, page
from lab.planner.asked import ACTIVATIONS, Asked
from lab.planner.checkpoints import Checkpoint

BUFFERS = 0.3
"""GiB beside the weights, at least: tables of positions and scratch."""
CHUNK_BLOCKS = {256: 600, 128: 200}
"""Blocks of the cache that the smallest chunk of a prompt takes at least for each stage
of the split, by the tokens of a block; starts of v0.33.0 took 832 and 256."""
AUTO = -1
"""Of `--moe-expert-cache-size`: `auto`."""
NAMED = 1024
"""Devices up to which every impossible split is named."""


_Cut = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Split:
    """A split of one replica that a release may start.

    Attributes:
        partition: layers of each stage, if they are not vLLM's own; or empty.
        host_experts: whether experts lie in the host's memory, and as many as there is
            room for on the device.
    """

    ranks: int
    stages: int
    partition: tuple[int, ...] = ()
    host_experts: bool = False

    def arguments(self, asked: Asked) -> dict[str, object]:
        """For vLLM's engine; `partition` is what VLLM_PP_LAYER_PARTITION says."""
        found: dict[str, object] = {
            "tensor_parallel_size": self.ranks,
            "pipeline_parallel_size": self.stages,
        }
        if asked.replicas > 1:
            found["data_parallel_size"] = asked.replicas
        if asked.expert_parallel:
            found["enable_expert_parallel"] = True
        if self.host_experts:
            # The cache of so many requests comes before more experts.
            found["moe_expert_cache_size"] = AUTO
            found["max_num_seqs"] = asked.of_a_replica
        if self.partition:
            found["partition"] = ",".join(map(str, self.partition))
        return found


def ranks(checkpoint: Checkpoint) -> list[int]:
    """Tensor-parallel ranks that divide the output groups and the heads."""
    groups, heads = checkpoint.groups, checkpoint.model.heads
    return [n for n in range(1, groups + 1) if groups % n == 0 and heads % n == 0]


def most(checkpoint: Checkpoint) -> int:
    """Devices of the largest split of one replica."""
    layers = checkpoint.model.layers
    deepest = max(n for n in range(1, layers + 1) if cut(checkpoint, n))
    return ranks(checkpoint)[-1] * deepest


def possible(checkpoint: Checkpoint, devices: int) -> list[Split]:
    """Those of one replica over all of so many devices, the most ranks first."""
    found = []
    for count in reversed(ranks(checkpoint)):
        stages, rest = divmod(devices, count)
        if rest or not (layers := cut(checkpoint, stages)):
            continue
        cuts = dict.fromkeys((layers, for_prompts(checkpoint, stages) or layers))
        own = even(checkpoint.model.layers, stages)
        found += [Split(count, stages, () if one == own else one) for one in cuts]
    return found


def for_prompts(checkpoint: Checkpoint, stages: int) -> tuple[int, ...]:
    """A cut with which prompts are read faster than with `cut`, of those the one whose
    fullest stage has fewest layers; empty if there is none, as where no layers compute
    a prompt's end alone."""
    model, usual = checkpoint.model, cut(checkpoint, stages)
    if not model.late or not usual:
        return ()
    found = []
    for begins in itertools.combinations(checkpoint.begins, stages - 1):
        edges = [*itertools.pairwise((0, *begins, model.layers))]
        if all(_starts(checkpoint.begins, checkpoint.anchors, *one) for one in edges):
            found.append(tuple(last - first for first, last in edges))
    pace = _slowest(checkpoint, usual)
    better = [one for one in found if _slowest(checkpoint, one) < pace]
    return min(
        better, key=lambda one: (max(one), _slowest(checkpoint, one)), default=()
    )


def _slowest(checkpoint: Checkpoint, sizes: tuple[int, ...]) -> int:
    """Layers that compute all rows of a prompt, of the stage with most."""
    early = checkpoint.model.layers - checkpoint.model.late
    edges = itertools.pairwise((0, *itertools.accumulate(sizes)))
    return max(min(last, early) - min(first, early) for first, last in edges)


def impossible(checkpoint: Checkpoint, devices: int) -> dict[str, str]:
    """Why the other splits over so many devices cannot be, by their names."""
    layers, known = checkpoint.model.layers, ranks(checkpoint)
    if devices > NAMED:
        return {
            "any split": f"at most {known[-1]} ranks that share the output groups and"
            f" {most(checkpoint) // known[-1]} stages of whole layers,"
            f" {most(checkpoint):,} devices for a replica"
        }
    found = {}
    for count in range(devices, 0, -1):
        stages, rest = divmod(devices, count)
        if rest:
            continue
        name = f"TP {count}" + (f", PP {stages}" if stages > 1 else "")
        if count not in known:
            found[name] = (
                f"{count} ranks do not divide the model's {checkpoint.groups} output"
                f" groups and {checkpoint.model.heads} heads"
            )
        elif stages > layers:
            found[name] = f"{stages} stages, and the model has {layers} layers"
        elif not cut(checkpoint, stages):
            found[name] = f"{stages} stages: {checkpoint.cuts}"
    return found


def even(layers: int, stages: int) -> tuple[int, ...]:
    """How many layers vLLM itself gives each stage."""
    found, more = [layers // stages] * stages, layers % stages
    for place in range(2, more + 2):
        found[-place] += 1
    return tuple(found)


def cut(checkpoint: Checkpoint, stages: int) -> tuple[int, ...]:
    """How many layers each of so many stages has: vLLM's own cut where the release
    starts with it, else one whose fullest stage has fewest; empty if there is none."""
    layers = checkpoint.model.layers
    if not 1 <= stages <= layers:
        return ()
    own = even(layers, stages)
    edges = (0, *itertools.accumulate(own))
    rules = checkpoint.begins, checkpoint.anchors
    if all(_starts(*rules, *one) for one in itertools.pairwise(edges)):
        return own
    return _cuts(layers, *rules).get((0, stages), (0, 0, ()))[2]


def _starts(
    begins: tuple[int, ...], anchors: tuple[int, ...], first: int, last: int
) -> bool:
    """Whether a release starts with a stage of the layers from `first` to `last`."""
    may_begin = not first or first in begins
    return may_begin and any(first <= layer < last for layer in anchors)


@cache
def _cuts(
    layers: int, begins: tuple[int, ...], anchors: tuple[int, ...]
) -> dict[tuple[int, int], _Cut]:
    """The best cut of the layers from one on into so many stages: how many layers the
    fullest has, the sum of all squares, which decides among equals, and the sizes."""
    found: dict[tuple[int, int], _Cut] = {(layers, 0): (0, 0, ())}
    for first in reversed(range(layers)):
        for last in range(first + 1, layers + 1):
            if not _starts(begins, anchors, first, last):
                continue
            size = last - first
            for stages in range(1, layers - last + 2):
                rest = found.get((last, stages - 1))
                if rest is None:
                    continue
                most, squares, sizes = rest
                one = max(most, size), squares + size * size, (size, *sizes)
                known = found.get((first, stages))
                if known is None or one[:2] < known[:2]:
                    found[first, stages] = one
    return found


def fewest(asked: Asked) -> Iterator[tuple[int, Split]]:
    """Splits that could carry the whole load by arithmetic, with their devices, fewest
    devices first."""
    for each in range(1, most(asked.checkpoint) + 1):
        for split in possible(asked.checkpoint, each):
            if promised(asked, split) >= asked.of_a_replica:
                yield each * asked.replicas, split


def promised(asked: Asked, split: Split) -> int:
    """Requests of one replica that fit at most, by arithmetic; negative if the weights
    do not."""
    return min(
        _stage(asked, split, first, last) for first, last in _bounds(asked, split)
    )


def _bounds(asked: Asked, split: Split) -> Iterator[tuple[int, int]]:
    sizes = split.partition or even(asked.checkpoint.model.layers, split.stages)
    edges = 0, *itertools.accumulate(sizes)
    return itertools.pairwise(edges)


def _stage(asked: Asked, split: Split, first: int, last: int) -> int:
    """Requests that fit on a rank of the stage of the layers `first` to `last`."""
    known = asked.checkpoint
    weights = 0.0
    for group in known.model.stored():
        ends = {"embedding": first == 0, "head": last == known.model.layers}
        # Experts are spread over the ranks of all replicas.
        spread = asked.replicas if group.part == "experts" else 1
        size = group.count * group.size
        size /= split.ranks * spread if group.sharded else 1
        part = (last - first) / known.model.layers
        weights += size * ends.get(group.part, part)
    left = asked.usable() - ACTIVATIONS - BUFFERS * GIB - weights
    of_block = sum(
        _page(known.ratios[layer], known.architecture.block_size)
        for layer in known.writing
        if first <= layer < last
    )
    if left <= 0 or not of_block:
        return -1 if left <= 0 else asked.of_a_replica
    block = known.architecture.block_size
    blocks = left / of_block - CHUNK_BLOCKS[block] * split.stages
    return math.floor(blocks / (asked.context / block))


def _page(ratio: int, block: int) -> int:
    """Bytes of a block of the entries of a layer, and of its indexer's keys."""
    entries = block // ratio
    keys = page(entries, INDEX_HEAD + 4) if ratio < 128 else 0
    return page(entries, 584) + keys
