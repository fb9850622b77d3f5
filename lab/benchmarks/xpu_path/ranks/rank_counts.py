# SPDX-License-Identifier: Apache-2.0
"""Hits and misses of the experts of a model, as its layers' caches count them."""

from typing import Any


def counted(vllm_config: Any, model: Any) -> dict[str, int]:
    """Of all layers. The engine's layers name their caches: a search through the
    garbage collector's objects finds none that vLLM has frozen after its start.

    Args:
        vllm_config: of the engine.
        model: whose parameters say what lies in this host's memory.
    """
    if not getattr(vllm_config.offload_config, "moe_expert_cache_size", 0):
        return {"copies": 0, "hits": 0, "misses": 0}
    from vllm.model_executor.layers.fused_moe.expert_cache import cached_layers

    caches = [layer.cache for layer in cached_layers(vllm_config)]
    counts = [cache.counts.tolist() for cache in caches]
    own = {part.data_ptr() for part in model.parameters() if part.is_cpu}
    # A view of another device's memory would be a copy.
    elsewhere = [cache for cache in caches if cache.host[0].data_ptr() not in own]
    return {
        "copies": len(elsewhere),
        "hits": sum(found[1] for found in counts),
        "misses": sum(found[2] for found in counts),
    }
