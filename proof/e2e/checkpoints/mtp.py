# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose draft of multi-token prediction knows what follows a token.

A random draft is never accepted, so nothing would show that it reads memory which
nobody wrote. Here `e_proj` turns the embedding of a token into the output vector of
its successor, so large that the rest of the layer adds nothing to it: what the draft
says depends on the embedding, the projection, the norms and the head.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from proof.e2e.checkpoints import checkpoint, packed

LOUD = 2.0**14
"""Length of what `e_proj` gives; attention and experts add vectors of length 100."""
THREE_LAYERS = checkpoint.Size(heads=16, groups=8, intermediate=1024)
"""Eight ranks can share the heads, the output groups and the FP8 blocks of the shared
experts."""
SIX_LAYERS = replace(THREE_LAYERS, ratios=2 * THREE_LAYERS.ratios)
"""Two stages can share them, each with every kind of layer."""


class Mtp(checkpoint.Writer):
    """Writes DeepSeek's formats, and a draft that knows `successors` of tokens."""

    def __init__(
        self,
        seed: int,
        successors: Mapping[int, int],
        size: checkpoint.Size = checkpoint.FLASH,
    ) -> None:
        super().__init__(seed)
        self.size = size
        self._successors = successors

    def says(self) -> dict[int, int]:
        """What the draft says after each token that it knows."""
        says = says_after(self._successors)
        return {token: says(token) for token in range(checkpoint.VOCABULARY)}

    def draft(self) -> None:
        super().draft()
        before, after = map(list, zip(*self.says().items(), strict=True))
        embedding = self.twin["embed.weight"][before]
        power = embedding.square().mean(1, keepdim=True)
        given = embedding * power.rsqrt() * self.twin["mtp.0.enorm.weight"]
        wanted = LOUD * self.twin["head.weight"][after]
        weight = torch.linalg.lstsq(given, wanted, driver="gelsd").solution.T
        self._quantized("mtp.0.e_proj", checkpoint.fp8_blocks(weight.contiguous()))


class Nvfp4Experts(Mtp, packed.Nvfp4Experts):
    """The same with the model's experts in NVFP4."""


def says_after(successors: Mapping[int, int]) -> Callable[[int], int]:
    """What the draft says after a token: the token again if it knows nothing."""
    return lambda token: successors.get(token, token)
