# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek-V4 that can chat: a tokenizer with DeepSeek's special tokens.

The tokenizer is byte-level BPE, as the published one. Its merges are trained on the
texts that the release itself puts around a conversation, across words, so that the
pages of instructions before a tool call are dozens of tokens and not hundreds.
"""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from proof.e2e.checkpoints.checkpoint import Size, Writer

ENCODING = "vllm/tokenizers/deepseek_v4_encoding.py"
BAR, BLANK = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
BEGIN = f"<{BAR}begin{BLANK}of{BLANK}sentence{BAR}>"
END = f"<{BAR}end{BLANK}of{BLANK}sentence{BAR}>"
USER, ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
THINK, THOUGHT, DSML = "<think>", "</think>", f"{BAR}DSML{BAR}"
SPECIAL = (BEGIN, END, USER, ASSISTANT, THINK, THOUGHT, DSML)
"""The first tokens, in this order: the configuration calls 0 the first and 1 the last
of a text."""
WRITTEN = (THINK, THOUGHT, DSML)
"""Those that a text shows: the parsers of older releases look for them there."""
MAX_LENGTH = 1024
SPARE = 16
"""Tokens of the model that no text is made of: the published model has hundreds."""
LONGEST = 64
"""Most characters of one token."""


class ChatWriter(Writer):
    """DeepSeek's own format, 1,024 tokens of vocabulary and as many of context."""

    size = Size(vocabulary=1024)

    def __init__(self, site: Path) -> None:
        """`site` is where the release is installed."""
        super().__init__(seed=0)
        self._texts = [
            node.value
            for node in ast.walk(ast.parse((site / ENCODING).read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]

    def described(self) -> dict[str, Any]:
        """A context that instructions about tools fit into."""
        scaling = {"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1}
        scaling["original_max_position_embeddings"] = MAX_LENGTH // 32
        return {"max_position_embeddings": MAX_LENGTH, "rope_scaling": scaling}

    def write_tokenizer(self, folder: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = alphabet
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.size.vocabulary - SPARE,
            min_frequency=1,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=LONGEST,
            show_progress=False,
        )
        tokenizer.train_from_iterator(self._texts, trainer)
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in WRITTEN])
        tokenizer.save(str(folder / "tokenizer.json"))
        described = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(described))


class StagedChatWriter(ChatWriter):
    """Six layers: two pipeline stages with every kind of layer."""

    size = replace(ChatWriter.size, ratios=(0, 4, 128, 4, 128, 4))
