# SPDX-License-Identifier: Apache-2.0
"""Faults put into a running engine, one a layer, to see that the comparison finds them.

Lives inside an installed vLLM, beside `recording.py`. Layer 0 forgets its sinks,
layer 1 answers one wrong index in each row of its top-k, layer 2 turns by a wrong RoPE
table; and one scale byte of a page of layer 1 is wrong after the first step.
"""

from typing import Any

import torch

EXPONENT_STEP = 3
TOKEN_BYTES = 576
SCALE_BYTES = 8


def break_layers(model: torch.nn.Module) -> None:
    """Break the first three layers of a loaded model."""
    layers = model.model.layers
    forget_sinks(layers[0].attn)
    miss_one_index(layers[1].attn)
    damage_page(layers[1].attn)
    turn_wrongly(layers[2].attn)


def forget_sinks(attention: Any) -> None:
    attention.attn_sink.data.fill_(float("-inf"))


def turn_wrongly(attention: Any) -> None:
    """Positions count twice; a shift alone would cancel out."""
    table = attention.rotary_emb.cos_sin_cache
    rows = torch.arange(len(table)) * 2 % len(table)
    table.copy_(table[rows])


def miss_one_index(attention: Any) -> None:
    """Each row that had to choose gets an entry it left out for its best one."""
    indexer, buffer = attention.indexer.indexer_op, attention.topk_indices_buffer

    def exchange(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for row in buffer[buffer[:, -1] >= 0]:
            left_out = set(range(int(row.max()))) - set(row.tolist())
            if left_out:
                index = (buffer == row).all(1).nonzero()[0]
                buffer[index, 0] = min(left_out)

    indexer.register_forward_hook(exchange, with_kwargs=True)


def damage_page(attention: Any) -> None:
    """One of the first token's seven exponents grows, between two steps."""
    pages: list[torch.Tensor] = []

    def damage(module: Any, args: Any, kwargs: Any) -> None:
        cache = attention.swa_cache_layer.kv_cache
        if not cache.numel() or pages:
            return
        used = cache.flatten(1).any(1).nonzero()
        if len(used):
            page = cache[int(used[0])].flatten()
            page[cache.shape[1] * TOKEN_BYTES] += EXPONENT_STEP
            pages.append(page)

    attention.register_forward_pre_hook(damage, with_kwargs=True)
