# SPDX-License-Identifier: Apache-2.0
"""The hashes of n-grams that choose Engram's rows, by Python's integers, and the state
that computes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import layout
from .engram_tables import DEAD, ENGRAM, NGRAM, engram_layout


def multipliers(layers: list[int], vocab: int) -> list[list[int]]:
    """Odd numbers of numpy's generator, seeded by the layer, below half of what keeps a
    product in 63 bits."""
    bound = max(1, (2**63 - 1) // vocab // 2)
    return [
        [
            2 * int(value) + 1
            for value in np.random.default_rng(10007 * number).integers(
                0, bound, size=NGRAM, dtype=np.int64
            )
        ]
        for number in layers
    ]


def reference_hash(
    ids: list[int], layer: int, primes: list[list[int]], pad: int, factors: list[int]
) -> list[int]:
    """Columns of the n-grams that end an `ids` list, which starts at position 0; DEAD
    or the text's begin shuts what lies behind it."""
    rolling, columns, offset, shut = 0, [], 0, False
    flat = [prime for order in primes for prime in order]
    starts = [sum(flat[:n]) for n in range(len(flat))]
    for back in range(NGRAM):
        shut = shut or back >= len(ids) or ids[-1 - back] == DEAD
        rolling ^= (pad if shut else ids[-1 - back]) * factors[back]
        if back:
            for prime in primes[back - 1]:
                columns.append(rolling % prime + starts[offset])
                offset += 1
    return columns


def hash_state(config: Any, folder: Path) -> Any:
    """Engram's, over a tokenizer of eight words, two of which are one, in `folder`."""
    vocab = {word: n for n, word in enumerate(["a", "b", "c", "d", "e", "f", "g", "A"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    config.model_config.tokenizer = str(folder)
    config.model_config.trust_remote_code = False
    config.model_config.revision = None
    window = torch.nn.Module()
    window.block_size = 32
    return (
        layout.module(ENGRAM)
        .NgramHashState(config, engram_layout(), window)
        .to(layout.device())
    )
