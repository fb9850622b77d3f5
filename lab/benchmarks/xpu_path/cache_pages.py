# SPDX-License-Identifier: Apache-2.0
"""Paged caches filled with random entries, as a long context would have left them."""

from typing import Any

import torch

IN_FP8 = ", FP8"
"""Ends the label of an error of attention that wrote the operands of wo_a's product."""

ENTRY, DATA, SCALES = 584, 576, 8
INDEX_ENTRY, INDEX_DATA = 132, 128
DISTINCT = 512
"""Pages that differ; further pages repeat them."""


def zero_caches(runner: Any) -> None:
    """Make every page of every cache zero."""
    for layers in _layers(runner):
        for layer in layers:
            layer.kv_cache.zero_()


def fill_caches(runner: Any, batch: int, tokens: int, seed: int = 0) -> None:
    """Fill the pages that the requests of a batch have, in the order of their texts.

    Groups of layers share memory: a page belongs to the group whose block table names
    it. Block 0 belongs to nobody.
    """
    for (table, size), layers in zip(_tables(runner), _layers(runner), strict=True):
        blocks = table[:batch, : -(-tokens // size)].flatten().long()
        blocks = blocks[blocks > 0]
        for layer in layers:
            pages = random_pages(layer.kv_cache, seed)
            order = torch.arange(len(blocks), device=blocks.device) % len(pages)
            layer.kv_cache[blocks] = pages[order]


def _tables(runner: Any) -> list[tuple[torch.Tensor, int]]:
    """Each group's block table and the tokens of a block, of vLLM's V1 or V2 runner."""
    if hasattr(runner, "block_tables"):
        groups = runner.kv_cache_config.kv_cache_groups
        sizes = (group.kv_cache_spec.block_size for group in groups)
        return list(zip(runner.block_tables.input_block_tables, sizes, strict=True))
    tables = runner.input_batch.block_table.block_tables
    return [(table.block_table.gpu, table.block_size) for table in tables]


def _layers(runner: Any) -> list[list[Any]]:
    """The layers of each group that have a cache."""
    context = runner.vllm_config.compilation_config.static_forward_context
    groups = runner.kv_cache_config.kv_cache_groups
    return [[context[name] for name in group.layer_names] for group in groups]


def random_pages(cache: torch.Tensor, seed: int) -> torch.Tensor:
    """`DISTINCT` pages `[pages, tokens, width]` like those of a cache, by its width or
    its type."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    count, tokens = DISTINCT, cache.shape[1]

    def normal(*shape: int) -> torch.Tensor:
        made = torch.empty(count, tokens, *shape, device=cache.device)
        return made.normal_(generator=generator)

    if cache.dtype == torch.float32:
        return normal(cache.shape[2])
    if cache.shape[2] == ENTRY:
        codes = normal(448).to(torch.float8_e4m3fn).view(torch.uint8)
        rope = normal(64).bfloat16().view(torch.uint8)
        data = torch.cat((codes, rope), -1).flatten(1)
        scales = torch.full_like(data[:, : tokens * SCALES], 127)
        return torch.cat((data, scales), 1).view(count, tokens, ENTRY)
    if cache.shape[2] == INDEX_ENTRY:
        codes = normal(INDEX_DATA).to(torch.float8_e4m3fn).view(torch.uint8)
        ones = torch.ones(count, tokens, device=cache.device).view(torch.uint8)
        return torch.cat((codes.flatten(1), ones), 1).view(count, tokens, INDEX_ENTRY)
    raise ValueError(f"no cache is known with entries of {tuple(cache.shape)}")


def expected_core(
    layer: Any,
    metadata: Any,
    own: Any,
    q: torch.Tensor,
    row: int,
    position: int,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """What attention gives for one token, `[heads, 512]`, by float64 from the pages.

    Args:
        layer: the attention layer.
        metadata: the batch's metadata of the window's cache; `own` of the layer's.
        q: `[heads, 512]`, after norm and RoPE.
        row: the token's place in the batch.
        position: its place in its text.
        chosen: the indexer's choice for it, with -1 for none.
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
            entries = chosen[chosen >= 0].long()
        size = own.block_size // layer.compress_ratio
        blocks = own.block_table[request].long()
        slots = blocks[entries // size] * size + entries % size
        parts.append(decode_tokens(layer.kv_cache, slots))
    k = torch.cat(parts)
    heads = len(q)
    score = q.double() @ k.T * layer.scale
    sink = layer.attn_sink[:heads].double()[:, None]
    return torch.cat((score, sink), 1).softmax(1)[:, :-1] @ k


def of_operands(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 values of e4m3 rows `[G, D]` with a scale for each 128."""
    return data.double() * scale.double().repeat_interleave(128, -1)


def in_fp8(layer: Any, core: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What a token's attention `[heads, 512]` becomes as operand of wo_a's product."""
    from kernels.reference.mla.inv_rope import inv_rope_fp8_quant

    groups = layer.n_local_groups
    data, scale = inv_rope_fp8_quant(
        core[None],
        position[None],
        layer.rotary_emb.cos_sin_cache,
        groups,
        len(core) // groups,
    )
    return of_operands(data[0], scale[0])
