# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of DeepSeek-V4, and vLLM's manager of them."""

from typing import Any

import torch

from . import layout

PAGE = 256
"""Tokens of a block of the compressed caches."""
WINDOWS = {"window": (64, 128), "state of ratio 4": (4, 8), "state of 128": (8, 128)}
"""Tokens of a block and of the window, of the groups that keep a window."""
MAX_MODEL_LEN = 4096


def cache_config(num_blocks: int) -> Any:
    """A `KVCacheConfig` of compressed pages first, then the windows, in their order."""
    interface = layout.module("vllm.v1.kv_cache_interface")
    heads = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    main = interface.MLAAttentionSpec(block_size=PAGE, **heads)
    groups = [interface.KVCacheGroupSpec(["pages"], main)]
    for name, (block_size, window) in WINDOWS.items():
        spec = interface.SlidingWindowMLASpec(
            block_size=block_size, sliding_window=window, **heads
        )
        groups.append(interface.KVCacheGroupSpec([name], spec))
    return interface.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )


def manager(num_blocks: int = 4096) -> Any:
    """A manager of vLLM's, of `num_blocks` blocks with the null block."""
    return layout.module("vllm.v1.core.kv_cache_manager").KVCacheManager(
        cache_config(num_blocks),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=PAGE,
        hash_block_size=4,
        enable_caching=True,
    )


def request(tokens: int, **params: Any) -> Any:
    """A request of a prompt of `tokens` tokens; `params` say what is transferred."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id="request",
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(
            max_tokens=8, extra_args={"kv_transfer_params": params} if params else None
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(4, sha256),
    )
