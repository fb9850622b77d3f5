# SPDX-License-Identifier: Apache-2.0
"""XPU's worker gives DSpark's draft model a workspace of its own."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

WORKER = "vllm.v1.worker.xpu_worker"
WORKSPACE = "vllm.v1.worker.workspace"


class RunnerReached(Exception):
    """The worker has prepared what its model runner needs."""


@pytest.fixture
def no_manager() -> Iterator[None]:
    """Another test's workspace would be kept."""
    reset = layout.module(WORKSPACE).reset_workspace_manager
    reset()
    yield
    reset()


def start_worker(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`XPUWorker.init_device` of one rank, up to its model runner, without a device."""
    worker = layout.module(WORKER)
    start = layout.module(WORKSPACE).init_workspace_manager

    def runner(*args: Any) -> None:
        raise RunnerReached

    for name, value in {
        "XPUModelRunnerV2": runner,
        "init_worker_distributed_environment": lambda *args: None,
        "MemorySnapshot": lambda device: None,
        "request_memory": lambda *args: 0,
        "init_workspace_manager": lambda _, *args: start(layout.device(), *args),
    }.items():
        monkeypatch.setattr(worker, name, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(
        worker.current_platform, "check_if_supports_dtype", lambda _: None
    )
    properties = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    for name in ("CCL_ATL_TRANSPORT", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    config = model_configs.vllm_config(speculative_tokens=1)
    object.__setattr__(config.speculative_config, "method", method)
    rank = SimpleNamespace(
        vllm_config=config,
        parallel_config=config.parallel_config,
        model_config=SimpleNamespace(dtype=torch.bfloat16, seed=0),
        cache_config=config.cache_config,
        device_config=SimpleNamespace(device=torch.device("xpu")),
        distributed_init_method="",
        use_v2_model_runner=True,
        local_rank=0,
        rank=0,
    )
    with pytest.raises(RunnerReached):
        worker.XPUWorker.init_device(rank)


def borrow(lane: int) -> torch.Tensor:
    workspace = layout.module(WORKSPACE)
    with workspace.use_workspace_lane(lane):
        manager = workspace.current_workspace_manager()
        (lent,) = manager.get_simultaneous(((256,), torch.uint8))
    return lent


def test_the_draft_has_its_own(
    no_manager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("dspark", monkeypatch)
    draft, target = borrow(1), borrow(0)
    assert draft.data_ptr() != target.data_ptr()


@pytest.mark.unchanged
def test_others_share_one(no_manager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start_worker("mtp", monkeypatch)
    assert borrow(0).numel() == 256
    with pytest.raises(RuntimeError, match="lane 1 is not configured"):
        borrow(1)
