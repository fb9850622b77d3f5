# SPDX-License-Identifier: Apache-2.0
"""Hits and bytes of experts in host memory, as the engine's metrics."""

import time
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from helpers import layout, model_configs

NAMES = ("queries", "hits", "bytes_read")
OWN = f"{layout.FUSED_MOE}.expert_cache_stats"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of metrics, and of none before."""
    fresh = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        made = getattr(prometheus_client, kind)
        loggers = layout.module("vllm.v1.metrics.loggers").PrometheusStatLogger
        name = f"_{kind.lower()}_cls"

        def build(*args: Any, made: Any = made, **named: Any) -> Any:
            return made(*args, **named, registry=fresh)

        monkeypatch.setattr(loggers, name, staticmethod(build))
    return fresh


def logger_of(slots: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = layout.module("vllm.v1.metrics.loggers")
    config = model_configs.vllm_config()
    offload = layout.module("vllm.config").OffloadConfig
    config.offload_config = offload(moe_expert_cache_size=slots)
    config.model_config.served_model_name = "tiny"
    config.model_config.get_num_experts = lambda: 8
    for part in ("spec_decoding", "kv_connector", "ec_connector", "perf_metrics"):
        monkeypatch.setattr(
            module.PrometheusStatLogger,
            f"_{part}_cls",
            lambda *_, **__: SimpleNamespace(),
        )
    monkeypatch.setattr(module, "unregister_vllm_metrics", lambda: None)
    return module.PrometheusStatLogger(config, [0])


@pytest.mark.parametrize("slots", [6, -1, 0])
def test_metrics_are_sums_of_what_is_read(
    slots: int, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = layout.module("vllm.v1.metrics.stats")
    logger = logger_of(slots, monkeypatch)
    for found in ((12, 5, 700), (6, 6, 0)):
        counted = stats.ExpertCacheStats(*found)
        logger.record(stats.SchedulerStats(expert_cache_stats=counted), None)
    logger.record(stats.SchedulerStats(), None)
    values = [
        registry.get_sample_value(
            f"vllm:expert_cache_{name}_total", {"model_name": "tiny", "engine": "0"}
        )
        for name in NAMES
    ]
    assert values == ([18, 11, 700] if slots else [None] * 3)


@pytest.mark.unchanged
def test_other_platforms_get_no_metric_more(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anyone who keeps the experts on the device."""
    stats = layout.module("vllm.v1.metrics.stats")
    logger_of(0, monkeypatch).record(stats.SchedulerStats(), None)
    names = {found.name for found in registry.collect()}
    assert "vllm:num_requests_running" in names
    assert not [name for name in names if "expert_cache" in name]


class Executor:
    """Of two workers of two layers each, of experts of 10 and 20 bytes."""

    def __init__(self) -> None:
        self.asked = 0
        self.caches = [
            SimpleNamespace(
                counts=torch.zeros(4, dtype=torch.int64, device=layout.device()),
                expert_bytes=size,
            )
            for size in (10, 20)
        ]
        layers = {
            str(number): SimpleNamespace(
                routed_experts=SimpleNamespace(
                    quant_method=SimpleNamespace(
                        moe_kernel=SimpleNamespace(
                            fused_experts=SimpleNamespace(cache=cache)
                        )
                    )
                )
            )
            for number, cache in enumerate(self.caches)
        }
        compilation = SimpleNamespace(
            static_forward_context=layers, static_all_moe_layers=list(layers)
        )
        config = SimpleNamespace(compilation_config=compilation)
        self.worker = SimpleNamespace(vllm_config=config)

    def collective_rpc(self, method: Any) -> list[Any]:
        self.asked += 1
        return [method(self.worker) for _ in range(2)]


def test_workers_are_asked_at_times_and_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = layout.module(OWN)
    clock = [100.0]
    monkeypatch.setattr(
        own, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )
    executor = Executor()
    # What was counted while the engine started is no step's.
    executor.caches[0].counts[:3] = torch.tensor([7, 7, 7])
    reader = own.ExpertCacheReader(executor)

    def step(is_idle: bool, logs: bool = True) -> Any:
        for cache in executor.caches:
            cache.counts[:3] += torch.tensor([1, 4, 2], device=cache.counts.device)
        stats = SimpleNamespace(expert_cache_stats=None)
        outputs = {
            0: SimpleNamespace(scheduler_stats=None),
            1: SimpleNamespace(scheduler_stats=stats if logs else None),
        }
        reader.attach(outputs, is_idle)
        return stats.expert_cache_stats

    assert step(False) is None and executor.asked == 1
    clock[0] += own.INTERVAL
    assert step(False, logs=False) is None and executor.asked == 1
    found = step(False)
    # Three steps of two workers' two layers.
    of_a_layer = 3 * 2
    assert (found.queries, found.hits) == (12 * of_a_layer, 8 * of_a_layer)
    assert found.bytes_read == of_a_layer * 2 * (10 + 20)
    assert step(False) is None
    found = step(True)
    assert (found.queries, found.hits, found.bytes_read) == (48, 32, 240)
    assert executor.asked == 3


def engine(reader: Any, busy: bool) -> tuple[Any, dict[int, str]]:
    """A core whose scheduler has requests, and the outputs of its step."""
    core = layout.module("vllm.v1.engine.core").EngineCore
    made, outputs = core.__new__(core), {0: "output"}
    made.expert_cache_reader = reader
    made.log_stats = False
    made.scheduler = SimpleNamespace(has_unfinished_requests=lambda: busy)
    return made, outputs


@pytest.mark.parametrize("busy", [False, True])
def test_a_step_tells_whether_the_engine_is_idle(busy: bool) -> None:
    seen: list[Any] = []
    reader = SimpleNamespace(attach=lambda *given: seen.append(given))
    made, outputs = engine(reader, busy)
    made._attach_expert_cache_stats(outputs)
    assert seen == [(outputs, not busy)]
    made, outputs = engine(None, busy)
    made._attach_expert_cache_stats(outputs)
