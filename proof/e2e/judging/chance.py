# SPDX-License-Identifier: Apache-2.0
"""What random sampling may draw, and whether counts of what it drew agree with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

RATE = 1e-6
"""How often a right sampler fails one test of counts."""
LEAST = 5.0
"""Least expected count of a class, for chi-squared to be near its distribution."""
SAME = 1e-4
"""Shares and logits that are nearer to each other than this may change places."""


@dataclass
class Draw:
    """One token that was drawn: its number, and what could have been, float64 `[V]`.

    `edge` says that rounding decides which tokens belong to the best k or p: then
    `shares` are the largest set, good for what must not be drawn, not for counts.
    """

    token: int
    shares: torch.Tensor
    edge: bool


def draw(
    token: int, logits: torch.Tensor, sampling: Mapping[str, Any], among: Sequence[int]
) -> Draw:
    """What a request's parameters make of the model's `logits`, `[V]`.

    First the grammar's choice `among` tokens (all if empty), then temperature, the best
    k, and of these the fewest that have the probability p together.
    """
    values = logits.double() / sampling.get("temperature", 1.0)
    if among:
        kept = torch.full_like(values, float("-inf"))
        kept[list(among)] = values[list(among)]
        values = kept
    edge = False
    if top_k := sampling.get("top_k"):
        ranked = values.sort(descending=True).values
        last, next_ = ranked[top_k - 1], ranked[top_k]
        edge |= bool(last - next_ < SAME)
        values = values.where(values >= last - SAME, float("-inf"))
    if top_p := sampling.get("top_p"):
        shares, order = values.softmax(0).sort(descending=True)
        before = shares.cumsum(0) - shares
        edge |= bool(((before - top_p).abs() < SAME).any())
        last = shares[(before < top_p + SAME).nonzero()[-1]]
        # Of equal shares either may be the last.
        edge |= int((shares - last).abs().lt(SAME * last).sum()) > 1
        values[order[shares < last * (1 - SAME)]] = float("-inf")
    return Draw(token, values.softmax(0), edge)


def p_value(draws: Sequence[Draw], by_rank: bool) -> float:
    """How often a right sampler's counts are at least as far off, by chi-squared.

    Counted are tokens, or their ranks among what could have been drawn. Each draw has
    shares of its own, which makes counts vary less than those of one distribution:
    the test errs on the side of passing.
    """
    expected = torch.zeros_like(draws[0].shares)
    counts = torch.zeros_like(expected)
    for one in draws:
        order = one.shares.argsort(descending=True) if by_rank else slice(None)
        expected += one.shares[order]
        drawn = torch.zeros_like(expected)
        drawn[one.token] = 1
        counts += drawn[order]
    rows = sorted(zip(expected.tolist(), counts.tolist(), strict=True), reverse=True)
    classes = [[0.0, 0.0]]
    for share, count in rows:
        if classes[-1][0] >= LEAST:
            classes.append([0.0, 0.0])
        classes[-1][0] += share
        classes[-1][1] += count
    if classes[-1][0] < LEAST and len(classes) > 1:
        share, count = classes.pop()
        classes[-1][0] += share
        classes[-1][1] += count
    if len(classes) == 1:
        return 1.0
    statistic = sum((count - share) ** 2 / share for share, count in classes)
    freedom = torch.tensor((len(classes) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))


def excess(draws: Sequence[Draw]) -> float:
    """A bound of how often a right sampler draws any token as much too often.

    Chernoff's bound of a sum of draws with shares of their own, times the number of
    tokens. Chi-squared puts rare tokens together and so hides one that is favoured.
    """
    expected = torch.stack([one.shares for one in draws]).sum(0)
    tokens = torch.tensor([one.token for one in draws])
    counts = tokens.bincount(minlength=len(expected)).double()
    more = counts > expected
    exponent = counts * (counts / expected).log() - counts + expected
    bounds = (-exponent).exp().where(more, 1.0)
    return min(1.0, float(bounds.min()) * len(expected))
