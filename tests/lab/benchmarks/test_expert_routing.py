# SPDX-License-Identifier: Apache-2.0
"""The synthetic routing of the benchmark, and what slots can hit of it."""

from collections import Counter

import pytest
import torch

from kernels.reference.moe.expert_cache import ExpertCache
from lab.benchmarks.expert_cache import RECENT, Layer, routing

SLOTS = 25
"""A tenth of the experts."""


@pytest.mark.parametrize(("tokens", "ideal"), [(1, 0.63), (4, 0.55)])
def test_few_slots_hit_nearly_what_the_likeliest_experts_would(
    tokens: int, ideal: float
) -> None:
    """Slots that always held those chosen most often of late: a bound, since a step's
    own experts need slots, too."""
    layer = Layer(steps=4096)
    cache = ExpertCache(layer.experts, [-1] * SLOTS)
    recent = list(range(RECENT))
    hits = needed = 0
    for ids in routing(layer, tokens, torch.device("cpu")):
        chosen = ids.flatten().tolist()
        cache.step(chosen, tokens)
        held = {expert for expert, _ in Counter(recent).most_common(SLOTS)}
        hits += len(held & set(chosen))
        needed += len(set(chosen))
        recent = (recent + chosen)[-RECENT:]
    assert hits / needed == pytest.approx(ideal, abs=0.01)
    assert hits / needed - cache.hits / needed < 0.03
