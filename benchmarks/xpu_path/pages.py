# SPDX-License-Identifier: Apache-2.0
"""Paged caches filled with random entries, as a long context would have left them."""

from typing import Any

import torch

ENTRY, DATA, SCALES = 584, 576, 8
INDEX_ENTRY, INDEX_DATA = 132, 128
DISTINCT = 512
"""Pages that differ; further pages repeat them."""


def fill_caches(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every cache of every attention layer."""
    filled: set[int] = set()
    for module in model.modules():
        cache = getattr(module, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or not cache.numel():
            continue
        if cache.data_ptr() not in filled:
            filled.add(cache.data_ptr())
            fill_cache(cache, seed)


def fill_cache(cache: torch.Tensor, seed: int) -> None:
    """Fill one cache `[pages, tokens, width]`, by its width or its type."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    count, tokens = min(DISTINCT, len(cache)), cache.shape[1]

    def normal(*shape: int) -> torch.Tensor:
        made = torch.empty(count, tokens, *shape, device=cache.device)
        return made.normal_(generator=generator)

    if cache.dtype == torch.float32:
        pages: torch.Tensor = normal(cache.shape[2])
    elif cache.shape[2] == ENTRY:
        codes = normal(448).to(torch.float8_e4m3fn).view(torch.uint8)
        rope = normal(64).bfloat16().view(torch.uint8)
        scales = torch.full((count, tokens, SCALES), 127, device=cache.device)
        scales = scales.to(torch.uint8)
        data = torch.cat((codes, rope), -1)
        pages = torch.cat((data.flatten(1), scales.flatten(1)), 1).view(
            count, tokens, ENTRY
        )
    elif cache.shape[2] == INDEX_ENTRY:
        codes = normal(INDEX_DATA).to(torch.float8_e4m3fn).view(torch.uint8)
        ones = torch.ones(count, tokens, device=cache.device).view(torch.uint8)
        pages = torch.cat((codes.flatten(1), ones), 1).view(count, tokens, INDEX_ENTRY)
    else:
        raise ValueError(f"no cache is known with entries of {tuple(cache.shape)}")
    for first in range(0, len(cache), count):
        part = cache[first : first + count]
        part.copy_(pages[: len(part)])


def expected_core(
    layer: Any, metadata: Any, own: Any, q: torch.Tensor, row: int, position: int
) -> torch.Tensor:
    """What attention gives for one token, `[heads, 512]`, by float64 from the pages.

    Args:
        layer: the attention layer.
        metadata: the batch's metadata of the window's cache; `own` of the layer's.
        q: `[heads, 512]`, after norm and RoPE.
        row: the token's place in the batch.
        position: its place in its text.
    """
    from kernels.reference.pages import decode_tokens

    request = int(metadata.token_to_req_indices[row])
    first = max(position - layer.window_size + 1, 0)
    keys = torch.arange(first, position + 1, device=q.device)
    blocks = metadata.block_table[request].long()
    size = metadata.block_size
    slots = blocks[keys // size] * size + keys % size
    parts = [decode_tokens(layer.swa_cache_layer.kv_cache, slots)]
    if layer.compress_ratio > 1:
        entries = torch.arange((position + 1) // layer.compress_ratio, device=q.device)
        if layer.compress_ratio == 4:
            chosen = layer.topk_indices_buffer[row].long()
            entries = chosen[chosen >= 0]
        size = own.block_size // layer.compress_ratio
        blocks = own.block_table[request].long()
        slots = blocks[entries // size] * size + entries % size
        parts.append(decode_tokens(layer.kv_cache, slots))
    k = torch.cat(parts)
    heads = len(q)
    score = q.double() @ k.T * layer.scale
    sink = layer.attn_sink[:heads].double()[:, None]
    return torch.cat((score, sink), 1).softmax(1)[:, :-1] @ k
