# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a step writes to the caches, as numbers that are kept and compared."""

from typing import Any

import torch

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import NewRequestData

# A number for each block that a step wrote, by the caches' names in the model's order.
Digests = dict[str, torch.Tensor]


def written(runner: Any, requests: list[NewRequestData], num_tokens: int) -> Digests:
    """Numbers of the blocks that have `num_tokens` behind the context of each request,
    in the model's order."""
    digests = {}
    config = runner.vllm_config.compilation_config
    layers = config.static_forward_context
    total = runner.kv_cache_config.num_blocks
    for g, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        size = group.kv_cache_spec.block_size
        blocks = [
            r.block_ids[g][(r.num_computed_tokens + i) // size % len(r.block_ids[g])]
            for r in requests
            for i in range(num_tokens)
        ]
        for name in group.layer_names:
            cache = layers[name].kv_cache
            # Blocks of a kernel may be parts of those of the scheduler.
            dim = next(d for d, n in enumerate(cache.shape) if n % total == 0)
            parts = cache.unflatten(dim, (total, -1))
            index = torch.tensor(sorted(set(blocks)), device=cache.device)
            pages = parts.index_select(dim, index).movedim(dim, 0)
            digests[name] = page_digests(pages.flatten(1).contiguous())
    return dict(sorted(digests.items(), key=lambda d: extract_layer_index(d[0])))


def page_digests(pages: torch.Tensor) -> torch.Tensor:
    """A number for the bytes of each page, `[num_pages]`: exact, in any order of
    additions, and without a copy of the pages that stays."""
    values = pages.view(torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(1 << 62, values.shape[1:], generator=random)
    return (values * weights.to(values.device)).sum(1)


def first_layer(digests: Digests, expected: Digests) -> str | None:
    """The layers between which the caches differ first, in words."""
    previous = "the input"
    for name, numbers in expected.items():
        if not torch.equal(digests[name], numbers):
            return f"after {previous}, up to {name}"
        previous = name
    return None
