# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a benchmark say of their experts."""

import gc
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernels.xpu_dsv4.moe.expert_cache import ExpertCache, make_expert_cache
from lab.benchmarks.xpu_path.ranks.rank_counts import counted

OWN = "vllm.model_executor.layers.fused_moe.expert_cache"


@pytest.fixture
def caches() -> Iterator[list[ExpertCache]]:
    """Two layers' caches, frozen as vLLM freezes what it has after its start."""
    host = torch.zeros(4, 4, 8, dtype=torch.uint8)
    made = [
        make_expert_cache((host, host, host, host), 2, torch.device("cpu"))
        for _ in range(2)
    ]
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()


def test_counts_are_those_of_layers_that_are_frozen(
    caches: list[ExpertCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [one for one in gc.get_objects() if type(one) is ExpertCache]
    release = ModuleType(OWN)
    layers = [SimpleNamespace(cache=cache) for cache in caches]
    release.cached_layers = lambda config: layers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, OWN, release)
    for parent in (OWN.rsplit(".", n)[0] for n in range(1, 5)):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for number, cache in enumerate(caches):
        cache.counts[:3] = torch.tensor([9, 5 + number, 2])
    config = SimpleNamespace(offload_config=SimpleNamespace(moe_expert_cache_size=2))
    part = caches[0].host[0]
    model = SimpleNamespace(parameters=lambda: [part])
    assert counted(config, model) == {"copies": 0, "hits": 11, "misses": 4}
    config.offload_config = SimpleNamespace()
    assert counted(config, model) == {"copies": 0, "hits": 0, "misses": 0}
