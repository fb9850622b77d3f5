# SPDX-License-Identifier: Apache-2.0
"""Run a real compressor over whole requests and read what it wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from . import layout, model_configs

STATE_BLOCK = 8
PAGE_TOKENS = 64
# Bytes of an entry's codes and of its scales by head dim and whether it is in MXFP4.
ENTRY_BYTES = {(512, False): (576, 8), (128, False): (128, 4), (128, True): (64, 4)}


@dataclass
class Written:
    """`state` is what the state cache holds of each token, `[T, kv | score]`. `data`
    and `scales` are the bytes of each entry's page row, `[slots, bytes]`, where request
    r has its entries from slot r * PAGE_TOKENS / requests on."""

    state: torch.Tensor
    data: torch.Tensor
    scales: torch.Tensor


def build(
    config: Any, *, head_dim: int = 512, ratio: int = 4, mxfp4: bool = False
) -> Any:
    """A compressor as an attention layer has it, or with `head_dim` 128 its indexer,
    whose entries are in FP8 or MXFP4."""
    prefix = f"compressor_{head_dim}_{ratio}"
    cache = f"{prefix}.k_cache"
    config.compilation_config.static_forward_context[cache] = SimpleNamespace()
    with model_configs.current(config):
        return layout.module(layout.COMPRESSOR).DeepseekCompressor(
            vllm_config=config,
            compress_ratio=ratio,
            hidden_size=config.model_config.hf_config.hidden_size,
            head_dim=head_dim,
            rotate=head_dim == 128,
            prefix=prefix,
            k_cache_prefix=cache,
            use_fp4_cache=mxfp4,
        )


def run(
    config: Any,
    compressor: Any,
    kv_score: torch.Tensor,
    cos_sin: torch.Tensor,
    lengths: Sequence[int],
    *,
    padding: int = 0,
) -> Written:
    """Compress requests of these lengths, each from its first token on, and one
    token whose slot is -1. `padding` more rows lie beyond the slots.

    `kv_score` is `[sum(lengths), kv | score]`, fp32; `cos_sin` the rotary table.
    """
    from vllm.forward_context import set_forward_context

    device = layout.device()
    ratio = compressor.compress_ratio
    data, scale = ENTRY_BYTES[compressor.head_dim, compressor.use_fp4_cache]
    blocks = -(-max(lengths) // STATE_BLOCK)
    table = torch.arange(1, len(lengths) * blocks + 1).view(len(lengths), blocks)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    state_slots = table[owner, positions // STATE_BLOCK] * STATE_BLOCK
    state_slots += positions % STATE_BLOCK
    slots = owner * (PAGE_TOKENS // len(lengths)) + positions // ratio
    none = torch.tensor([-1])

    width = kv_score.shape[1]
    state = torch.full((int(table.max()) + 1, STATE_BLOCK, width), torch.nan)
    state = state.to(device)
    page = torch.zeros(1, PAGE_TOKENS, data + scale, dtype=torch.uint8, device=device)
    compressor.state_cache.kv_cache = state
    context = config.compilation_config.static_forward_context
    context[compressor.k_cache_prefix].kv_cache = page
    metadata = {
        compressor.state_cache.prefix: SimpleNamespace(
            token_to_req_indices=torch.cat((owner, none + 1)).int().to(device),
            slot_mapping=torch.cat((state_slots, none)).to(device),
            block_table=table.int().to(device),
            block_size=STATE_BLOCK,
            num_decode_tokens=0,
            c128_boundary=True,
        ),
        compressor.k_cache_prefix: SimpleNamespace(
            slot_mapping=torch.cat((slots, none)).to(device)
        ),
    }
    rows = torch.full((len(positions) + 1 + padding, width), torch.nan)
    rows[: len(positions)] = kv_score
    at = torch.full((len(rows),), ratio - 1)
    at[: len(positions)] = positions
    rope = SimpleNamespace(cos_sin_cache=cos_sin.to(device))
    with (
        model_configs.current(config),
        layout.worker(),
        set_forward_context(metadata, config),
    ):
        compressor(rows.to(device), at.to(device), rope)
    flat = page.flatten().cpu()
    return Written(
        state=state.cpu().flatten(0, 1)[state_slots],
        data=flat[: PAGE_TOKENS * data].view(PAGE_TOKENS, data),
        scales=flat[PAGE_TOKENS * data :].view(PAGE_TOKENS, scale),
    )
