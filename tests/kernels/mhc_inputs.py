# SPDX-License-Identifier: Apache-2.0
"""Streams, gates and mixes of the hyper-connections' tests."""

import torch

EPS = (1e-6, 1e-6, 1e-6, 2.0, 20)
"""Epsilons of norm, pre gates and Sinkhorn; factor of the post gates; rounds."""


def case(outer, hidden, device, gates=24, scales=3, amplitude=1.0):
    """Streams of unlike sizes and gates whose logits spread over a few units."""
    residual = (
        torch.randn(*outer, 4, hidden) * torch.tensor([1.0, 0.1, 3.0, 0.5])[:, None]
    )
    fn = torch.randn(gates, 4 * hidden) * (4 * hidden) ** -0.5 * amplitude
    arguments = (residual.bfloat16(), fn, torch.rand(scales) + 0.5, torch.randn(gates))
    return tuple(x.to(device) for x in arguments)


def mixed(outer, hidden, device):
    """A sublayer's output, and the mixes that spread it."""
    x = torch.randn(*outer, hidden).bfloat16()
    comb = torch.rand(*outer, 4, 4)
    comb = comb / comb.sum(-1, keepdim=True)
    return tuple(t.to(device) for t in (x, torch.rand(*outer, 4, 1) * 2, comb))
