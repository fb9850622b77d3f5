# SPDX-License-Identifier: Apache-2.0
"""Model experts that lie in the host's memory: those that a step needs and the device
lacks come over its link."""

from dataclasses import dataclass
from itertools import pairwise

from lab.aot.costs.step import Part, Range, Split, constants, distinct
from lab.memory import Shapes


@dataclass(frozen=True)
class Slots:
    """Room on a device for some of a layer's experts.

    Attributes:
        count: experts of each layer.
        link: gigabytes per second from the host to the device.
    """

    count: int
    link: float


def hits(model: Shapes, slots: Slots) -> Range:
    """Share of the experts that a step needs which has a slot."""
    share = min(1.0, slots.count / model.experts)
    points = constants()["expert_hits"]["found"]
    for (before, low), (behind, high) in pairwise(points):
        if share <= behind:
            along = (share - before) / (behind - before)
            return Range(low + along * (high - low), share)
    return Range(1, 1)


def fetched(model: Shapes, split: Split, slots: Slots, tokens: int) -> Part:
    """Experts that a step of `tokens` tokens reads over the link of each rank."""
    return _part(model, split, slots, _missing(model, slots, tokens))


def read(model: Shapes, split: Split, slots: Slots) -> Range:
    """Bytes of them that a token alone reads over each link."""
    count = _missing(model, slots, 1)
    ends = (
        read_bytes(model, split, x) / split.stages for x in (count.fast, count.slow)
    )
    return Range(*ends)


def streamed(model: Shapes, split: Split, slots: Slots, tokens: int) -> Part:
    """The same of a chunk of a prompt, which needs nearly all of them: at best as many
    as slots give by chance are not read again."""
    needed = distinct(model.experts, model.active, tokens)
    share = min(1.0, slots.count / model.experts)
    return _part(model, split, slots, Range(needed * (1 - share), needed))


def overlaps(model: Shapes, tokens: int) -> bool:
    """Whether a chunk is large enough that experts are copied while others compute:
    `USES` of `kernels.xpu_dsv4.moe.expert_waves`."""
    return tokens * model.active >= 4 * model.experts


def read_bytes(model: Shapes, split: Split, count: float) -> float:
    """Bytes of `count` experts of every layer, a rank's part of them."""
    (stored,) = (group for group in model.stored() if group.part == "experts")
    one = stored.count * stored.size / model.experts
    return count * one / split.ranks * model.padded(split.ranks)


def _missing(model: Shapes, slots: Slots, tokens: int) -> Range:
    """Of each layer's experts that a step needs, those without a slot."""
    needed, found = distinct(model.experts, model.active, tokens), hits(model, slots)
    return Range(needed * (1 - found.fast), needed * (1 - found.slow))


def _part(model: Shapes, split: Split, slots: Slots, count: Range) -> Part:
    fast, slow = constants()["host_link"]["share"]
    moved = slots.link * 1e6
    time = Range(
        read_bytes(model, split, count.fast) / moved / fast,
        read_bytes(model, split, count.slow) / moved / slow,
    )
    return Part("experts of the host", time, "host link")
