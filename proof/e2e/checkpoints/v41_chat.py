# SPDX-License-Identifier: Apache-2.0
"""A tiny V4.1 that can chat: the tokens that the release puts around a conversation
follow those of the characters."""

from pathlib import Path

from proof.e2e import pictures
from proof.e2e.checkpoints import checkpoint, v41
from proof.e2e.checkpoints.chat import SPECIAL

MARKS = (*SPECIAL, pictures.PLACEHOLDER_TEXT)
FIRST = checkpoint.VOCABULARY
"""The token of the first mark."""


class Chat(v41.V41):
    """The same with a token for each mark, that of an image among them."""

    size = v41.sized(FIRST + len(MARKS))

    def write_tokenizer(self, folder: Path) -> None:
        marks = {mark: FIRST + place for place, mark in enumerate(MARKS)}
        checkpoint.write_tokenizer(folder, marks)
