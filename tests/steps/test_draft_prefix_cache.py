# SPDX-License-Identifier: Apache-2.0
"""A prompt that was sent before is taken from the prefix cache, with a draft as well.

The groups are those of DeepSeek-V4: compressed pages of 256 tokens, windows of 128 in
blocks of 64 (the draft's too), and the compressors' states.
"""

from typing import Any

import pytest
import torch
from helpers import layout

PAGE = 256
WINDOWS = {"window": (64, 128), "state of ratio 4": (4, 8), "state of 128": (8, 128)}


def manager(*, draft: bool) -> Any:
    """A manager of vLLM's, of a cache for one model, with or without a draft."""
    interface = layout.module("vllm.v1.kv_cache_interface")
    heads = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    main = interface.MLAAttentionSpec(block_size=PAGE, **heads)
    groups = [interface.KVCacheGroupSpec(["pages"], main)]
    for name, (block_size, window) in WINDOWS.items():
        spec = interface.SlidingWindowMLASpec(
            block_size=block_size, sliding_window=window, **heads
        )
        group = interface.KVCacheGroupSpec([name], spec)
        group.is_eagle_group = draft and name == "window"
        groups.append(group)
    config = interface.KVCacheConfig(
        num_blocks=4096, kv_cache_tensors=[], kv_cache_groups=groups
    )
    return layout.module("vllm.v1.core.kv_cache_manager").KVCacheManager(
        config,
        max_model_len=4096,
        hash_block_size=4,
        enable_caching=True,
        use_eagle=draft,
    )


def request(name: str, tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(4, sha256),
    )


def taken(tokens: int, chunk: int, *, draft: bool) -> int:
    """How many tokens of a prompt come from the cache when it is sent again; first it
    is computed in chunks."""
    cache = manager(draft=draft)
    first = request("first", tokens)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        assert cache.allocate_slots(first, count) is not None
        first.num_computed_tokens += count
    _, found = cache.get_computed_blocks(request("second", tokens))
    return int(found)


@pytest.mark.parametrize("chunk", [128, 800, 4096])
@pytest.mark.parametrize(("tokens", "wanted"), [(800, 512), (833, 768), (513, 256)])
def test_a_repeated_prompt_with_a_draft(tokens: int, wanted: int, chunk: int) -> None:
    found = taken(tokens, chunk, draft=True)
    assert found == wanted, (
        f"{found} of {wanted} tokens of a repeated prompt are taken from the cache"
    )


@pytest.mark.unchanged
@pytest.mark.parametrize(("tokens", "wanted"), [(800, 768), (769, 768), (256, 0)])
def test_without_a_draft(tokens: int, wanted: int) -> None:
    assert taken(tokens, 128, draft=False) == wanted
