# SPDX-License-Identifier: Apache-2.0
"""The checkpoint with DSpark's draft model in place of multi-token prediction.

DSpark proposes a block of tokens in one pass over states of the target's layers, then
corrects each by a bias that the token before it chooses (`markov_head`). The random
draft alone would never be accepted, so the bias follows a table of successors.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from proof.e2e.checkpoints import checkpoint

STAGES = 2
TARGET_LAYERS = (0, 2)
BLOCK = 3
"""Tokens that a pass proposes."""
BIAS = 100.0
"""More than a logit of the draft can be."""


def following(texts: Iterable[list[int]]) -> dict[int, int]:
    """What follows a token in texts; its last place counts."""
    return {before: after for text in texts for before, after in pairwise(text)}


class DSpark(checkpoint.Writer):
    """Writes DeepSeek's formats, and a draft that knows `successors` of tokens."""

    target_layers: tuple[int, ...] = TARGET_LAYERS
    stages = STAGES
    markov = ("markov_w1", "markov_w2")
    """Names of the two factors of the bias."""

    def __init__(
        self,
        seed: int,
        successors: Mapping[int, int],
        size: checkpoint.Size | None = None,
    ) -> None:
        super().__init__(seed)
        self.size = size or self.size
        self._successors = successors

    def described(self) -> dict[str, Any]:
        return {
            "dspark_block_size": BLOCK,
            "dspark_markov_rank": checkpoint.VOCABULARY,
            "dspark_noise_token_id": 2,
            "dspark_target_layer_ids": list(self.target_layers),
            "n_mtp_layers": self.stages,
        }

    def draft(self) -> None:
        hidden = self.size.hidden
        for stage in range(self.stages):
            checkpoint.decoder_layer(self, f"mtp.{stage}", 0, hashed=False)
        self.fp8("mtp.0.main_proj", hidden, hidden * len(self.target_layers))
        self.norm("mtp.0.main_norm", hidden)
        last = f"mtp.{self.stages - 1}"
        self.norm(f"{last}.norm", hidden)
        self.output_head(f"{last}.")
        vocabulary, rank = self.size.vocabulary, checkpoint.VOCABULARY
        known, bias = torch.zeros(vocabulary, rank), torch.zeros(vocabulary, rank)
        for place, (token, successor) in enumerate(self._successors.items()):
            known[token, place], bias[successor, place] = 1.0, BIAS
        for factor, values in zip(self.markov, (known, bias), strict=True):
            self.plain(f"{last}.markov_head.{factor}.weight", values)
        confidence = self.random(1, hidden + rank, std=hidden**-0.5)
        self.plain(f"{last}.confidence_head.proj.weight", confidence)
