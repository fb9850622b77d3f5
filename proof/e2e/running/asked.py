# SPDX-License-Identifier: Apache-2.0
"""What two engines are asked, of which one reads a prompt and the other answers it.

A GPU's machine has what this imports.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from proof.e2e.checkpoints import checkpoint

LONGEST = 700
ENGINE = {
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_logprobs": -1,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": LONGEST,
    "max_num_seqs": 2,
}
"""What both engines take, besides those of every job."""
LONG = "twice as long"
"""The checkpoint's name."""
NEW, MANY = 3, 8
"""Tokens of an answer that is compared, and of one that needs blocks more."""


class Long(checkpoint.Writer):
    """Writes DeepSeek's formats, for prompts of 600 tokens."""

    size = replace(checkpoint.FLASH, length=1024)


@dataclass(frozen=True)
class Asked:
    """A prompt of random tokens, and how it is read."""

    length: int
    chunk: int = LONGEST
    """The most tokens of a step."""
    answered: bool = False
    """Whether the first engine answers it too, and answers are compared."""
    sender_knows: int = 0
    """How many tokens of its beginning the first engine has read before."""
    receiver_knows: int = 0
    overwritten: bool = False
    """Whether a byte is overwritten before the second engine fetches it."""
    preempted: bool = False
    """Whether the second engine runs out of blocks once it answers."""

    def order(self, seed: int) -> dict[str, Any]:
        """The prompt as `transfer.py` takes it."""
        chosen = random.Random(seed)
        tokens = [
            chosen.randrange(2, checkpoint.VOCABULARY) for _ in range(self.length)
        ]
        return {
            "tokens": tokens,
            "new": MANY if self.preempted else NEW if self.answered else 1,
            "chunk": self.chunk,
            "answered": self.answered,
            "sender_knows": self.sender_knows,
            "receiver_knows": self.receiver_knows,
            "overwritten": self.overwritten,
            "preempted": self.preempted,
        }


def on_ranks(size: int) -> dict[str, Any]:
    """The arguments of an engine of so many tensor-parallel ranks."""
    return {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "mp" if size > 1 else "uni",
    }
