# SPDX-License-Identifier: Apache-2.0
"""Metadata of a batch, and the builders that turn it into each layer's metadata."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from . import layout, model_configs, model_layers


def cpu_window_builder(config: Any) -> Any:
    """The CPU backend's metadata builder of a layer's window cache."""
    cache = model_layers.attention_layer(config, 0).swa_cache_layer
    builder = layout.module(layout.CPU).DeepseekV4CPUSparseSWAMetadataBuilder
    with model_configs.current(config):
        return builder(
            cache.get_kv_cache_spec(config),
            [cache.prefix],
            config,
            torch.device("cpu"),
        )


def indexer_builder(config: Any, indexer: Any = None) -> Any:
    """The metadata builder of a ratio-4 layer's `indexer`, from that layer's spec."""
    backend = layout.module(layout.INDEXER_BACKEND)
    indexer = indexer or model_layers.attention_layer(config, 4).indexer
    spec = indexer.k_cache.get_kv_cache_spec(config)
    arguments: dict[str, Any] = {
        "kv_cache_spec": spec,
        "layer_names": [indexer.k_cache.prefix],
        "vllm_config": config,
        "device": torch.device(layout.device()),
    }
    builder = backend.DeepseekV32IndexerMetadataBuilder
    if getattr(builder, "requires_block_table_width", False):
        arguments["block_table_width"] = layout.MAX_MODEL_LEN // layout.BLOCK_SIZE
    with model_configs.current(config), layout.worker():
        return builder(**arguments)


def common_metadata(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int = layout.BLOCK_SIZE,
) -> Any:
    """`CommonAttentionMetadata` of requests with these lengths, in tokens.

    Request i owns the blocks i·n + 1 to (i + 1)·n of its block table, and each new
    token's slot follows from its position.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    width = layout.MAX_MODEL_LEN // block_size
    requests = len(seq_lens)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
    table = torch.arange(1, requests * width + 1, dtype=torch.int32).view(-1, width)
    positions = torch.cat(
        [
            torch.arange(total - new, total)
            for total, new in zip(seq_lens, query_lens, strict=True)
        ]
    )
    owner = torch.repeat_interleave(torch.arange(requests), torch.tensor(query_lens))
    blocks = table[owner, positions // block_size].to(torch.int64)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    values = {
        "query_start_loc": starts.to(layout.device()),
        "query_start_loc_cpu": starts,
        "seq_lens": lengths.to(layout.device()),
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": requests,
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": table.to(layout.device()),
        "slot_mapping": (blocks * block_size + positions % block_size).to(
            layout.device()
        ),
        "positions": positions.to(layout.device()),
        "_seq_lens_cpu": lengths,
        "_num_computed_tokens_cpu": lengths - starts.diff(),
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(
        **{key: value for key, value in values.items() if key in known}
    )
