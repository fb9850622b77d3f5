# SPDX-License-Identifier: Apache-2.0
"""Captured graphs are compared with eager execution at start, for either runner."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout
from helpers.captured_graphs import (
    BLOCK,
    BLOCKS,
    SIZES,
    Plant,
    host_value,
    make,
    moved_index,
    small_number,
    stale_pointer,
    start,
)
from helpers.graph_verdicts import CHECK, other_rank

from . import starts


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "plant", [stale_pointer, host_value, small_number, moved_index]
)
def test_a_graph_that_differs_is_named_and_dropped(
    version: int,
    plant: Plant,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(version, plant, monkeypatch)
    assert start(runner) == 1
    assert not runner.has_graphs(), "the graph that differs is still there"
    assert "graph of 1 tokens" in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_graphs_that_agree_stay(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    assert start(runner) == 1
    assert runner.replays == 2 * len(SIZES), "no graph was compared"
    assert runner.has_graphs()
    assert not runner.known, "the runner still knows requests of the check"
    assert "6 batches are the same" in said.text
    assert not any(r.levelno >= logging.WARNING for r in said.records)


@pytest.mark.parametrize("version", [1, 2])
def test_the_start_ends_if_it_must(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "stop")
    runner = make(version, stale_pointer, monkeypatch)
    with pytest.raises(RuntimeError, match=r"graph of 1 tokens .* differs"):
        start(runner)


@pytest.mark.parametrize("version", [1, 2])
def test_a_graph_that_differs_on_another_rank_is_dropped_here_too(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of which one replays and one does not would wait for each other."""
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=2)
    assert start(runner) == 1
    assert not runner.has_graphs(), "this rank went by its own verdict"
    assert "graph of 2 tokens" in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_another_stage_has_more_graphs(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of drafts are on the last one."""
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=99)
    assert start(runner) == 1
    assert not runner.has_graphs(), "this rank went by its own verdict"
    assert "graph of another stage's drafts differs" in said.text


def outcome(rows: torch.Tensor) -> Any:
    return layout.module(f"{CHECK}_steps").Outcome(rows, None)


def test_rows_of_zeros_agree() -> None:
    rows = torch.zeros(2, 3)
    assert outcome(rows).error(outcome(rows)) == 0.0
    assert outcome(rows + 1).error(outcome(rows)) > 1e30
    assert outcome(rows * float("nan")).error(outcome(rows)) > 1e30


@pytest.mark.parametrize("version", [1, 2])
def test_eager_steps_that_differ_from_themselves_are_said(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of some ops come in another order each time, and other bytes to caches."""
    runner = make(version, None, monkeypatch)
    model, noise = runner.model_under_test, torch.Generator().manual_seed(0)
    compute = model.run

    def computed(*given: Any) -> torch.Tensor:
        rows: torch.Tensor = compute(*given)
        model.state_cache += torch.rand(1, generator=noise)
        return rows + 1e-2 * torch.rand(rows.shape, generator=noise)

    model.run = computed
    start(runner)
    assert runner.has_graphs()
    assert "an eager step run again by 0.0" in said.text
    assert "caches of 0 batches are the same" in said.text


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_nothing_runs_where_it_is_off(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "off")
    runner = make(version, stale_pointer, monkeypatch)
    assert start(runner) == 1
    assert runner.has_graphs() and runner.steps == 0


def test_a_word_that_the_check_does_not_know(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "on")
    with pytest.raises(ValueError, match="Use one of: fallback, stop, off"):
        start(make(1, None, monkeypatch))


def test_its_worker_is_named_for_this_model_alone(tmp_path: Path) -> None:
    """A worker that somebody names stays, as the emulation's does."""
    platform = layout.module("vllm_xpu_dsv4.platform").DeepSeekV4XPUPlatform
    config = starts.configured(tmp_path, {})
    for model, named, wanted in (
        ("deepseek_v4", "auto", "vllm_xpu_dsv4.worker.DeepSeekV4XPUWorker"),
        ("deepseek_v4", "somebodys.Worker", "somebodys.Worker"),
        ("llama", "auto", "vllm.v1.worker.xpu_worker.XPUWorker"),
    ):
        config.model_config.hf_text_config.model_type = model
        config.parallel_config.worker_cls = named
        platform.check_and_update_config(config)
        assert config.parallel_config.worker_cls == wanted
    worker = layout.module("vllm_xpu_dsv4.worker").DeepSeekV4XPUWorker
    assert issubclass(worker, layout.module("vllm.v1.worker.xpu_worker").XPUWorker)


class Recurrent(layout.module("vllm.model_executor.layers.mamba.abstract").MambaBase):  # type: ignore[misc]
    """A layer whose caches vLLM itself binds: a tuple of states."""

    def get_state_shape(self) -> Any:
        return ((4, 8), (2, 4, 4))

    def get_state_dtype(self) -> Any:
        return (torch.float32, torch.float32)

    @property
    def mamba_type(self) -> str:
        return "mamba2"


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_a_hybrid_model_starts(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention and recurrent layers, whose state each step moves on."""
    runner = make(version, None, monkeypatch)
    runner.model_config.hf_text_config = SimpleNamespace(model_type="qwen3_next")
    interface = layout.module("vllm.v1.kv_cache_interface")
    layer = Recurrent()
    spec = interface.MambaSpec(
        shapes=layer.get_state_shape(), dtypes=layer.get_state_dtype(), block_size=BLOCK
    )
    pages = torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)
    layer.bind_kv_cache(pages)
    name = "model.layers.1.linear_attn"
    runner.vllm_config.compilation_config.static_forward_context[name] = layer
    runner.vllm_config.cache_config = SimpleNamespace(mamba_cache_mode="none")
    runner.kv_cache_config.kv_cache_groups.append(
        SimpleNamespace(kv_cache_spec=spec, layer_names=[name])
    )
    assert start(runner) == 1
    assert runner.has_graphs() and runner.steps == 0
