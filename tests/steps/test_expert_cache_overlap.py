# SPDX-License-Identifier: Apache-2.0
"""A step that no graph captures copies experts while others compute."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.cached_experts import (
    EXPERTS,
    TOPK,
    build,
    current_config,
    load,
    method,
    outputs,
    take_slots,
)


@pytest.fixture
def config() -> Iterator[Any]:
    with current_config() as made:
        yield made


AS_BEFORE = pytest.param(40, EXPERTS // 2, marks=pytest.mark.unchanged)


@pytest.mark.parametrize(("captured", "waves"), [(0, EXPERTS), AS_BEFORE])
def test_captured_steps_alone_ask_no_host(
    captured: int, waves: int, config: Any
) -> None:
    """Each of two slots is a half; a captured step asks no host and has both."""
    config.compilation_config.max_cudagraph_capture_size = captured
    resident = method(moe_backend="triton")
    layer = build(resident)
    load(resident, layer)
    (wanted,) = outputs(resident, layer, (40,))
    take_slots(config, TOPK)
    cached = method()
    layer = build(cached)
    load(cached, layer)
    assert torch.equal(*outputs(cached, layer, (40,)), wanted)
    assert cached.moe_kernel.fused_experts.cache.counts[0] == waves


def test_without_graphs_no_step_is_captured(config: Any) -> None:
    config.compilation_config.max_cudagraph_capture_size = None
    take_slots(config, TOPK)
    cached = method()
    load(cached, build(cached))
    experts = cached.moe_kernel.fused_experts
    assert getattr(experts, "most_captured", None) == 0
