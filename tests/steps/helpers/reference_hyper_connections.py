# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections in float64, after their paper: gates from the
normalized streams, and a mixing matrix made doubly stochastic by Sinkhorn's rounds."""

from typing import NamedTuple

import torch

EPS = 1e-6
POST_MULT = 2.0
ROUNDS = 20


class Gates(NamedTuple):
    """What weighs a sublayer's output, `[tokens, streams]`, and what mixes the streams,
    `[tokens, streams, streams]`."""

    post: torch.Tensor
    comb: torch.Tensor


def _mixes(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    flat = streams.flatten(1)
    return flat @ fn.double().T * (flat.square().mean(1, keepdim=True) + EPS).rsqrt()


def gates(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, Gates]:
    """What sums the streams up into a sublayer's input, `[tokens, n]`, and the gates
    for its output.

    Args:
        streams: `[tokens, n, hidden]` float64.
        fn: `[n * (n + 2), n * hidden]`.
        scale: `[3]`: of input, output and mixing.
        base: `[n * (n + 2)]`.
    """
    n = streams.shape[1]
    parts = [n, n, n * n]
    first, second, third = _mixes(streams, fn).split(parts, dim=1)
    offsets = base.double().split(parts)
    gate = (first * scale[0].double() + offsets[0]).sigmoid() + EPS
    post = (second * scale[1].double() + offsets[1]).sigmoid() * POST_MULT
    comb = (third * scale[2].double() + offsets[2]).unflatten(1, (n, n)).softmax(-1)
    comb = comb + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(ROUNDS - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    return gate, Gates(post, comb)


def summed(streams: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A sublayer's input, `[tokens, hidden]`."""
    return torch.einsum("tn,tnh->th", gate, streams)


def before(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, Gates]:
    """A sublayer's input, and the gates for its output; arguments as for `gates`."""
    gate, rest = gates(streams, fn, scale, base)
    return summed(streams, gate), rest


def after(output: torch.Tensor, streams: torch.Tensor, gates: Gates) -> torch.Tensor:
    """The streams after a sublayer: post_j output + sum_i comb_ij streams_i."""
    mixed = torch.einsum("tij,tih->tjh", gates.comb, streams)
    return mixed + gates.post[..., None] * output[:, None]


def head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> torch.Tensor:
    """One stream from all, `[tokens, hidden]`; fn is `[n, n * hidden]`."""
    gate = (_mixes(streams, fn) * scale.double() + base.double()).sigmoid() + EPS
    return torch.einsum("tn,tnh->th", gate, streams)
