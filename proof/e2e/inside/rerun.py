# SPDX-License-Identifier: Apache-2.0
"""A stand-in for captured graphs on a CPU, which cannot record work: a replay runs the
captured step again, with the inputs and metadata that the capture had.

So a start has its graphs, and what the start does with them. A step that reads memory
which has moved, or a number of the host, is right here and wrong on a device.
"""

import importlib
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from standins.emulated_xpu.platform import EmulatedXpuPlatform
from standins.emulated_xpu.worker import EmulatedXpuWorker

CAPTURING: list[bool] = []
"""Not empty while a captured step runs."""


class Rerun:
    """A graph of one size."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def replay(self) -> None:
        """Layers see that they are captured, and decide as in a graph."""
        CAPTURING.append(True)
        try:
            self.step(CUDAGraphMode.NONE)
        finally:
            CAPTURING.pop()


def capture(manager: Any, make_step: Any, progress_bar_desc: str = "") -> None:
    """As `CudaGraphManager.capture`, for decode steps."""
    for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        make_step(desc, warmup=True)(CUDAGraphMode.NONE)
        manager.graphs[desc] = Rerun(make_step(desc, warmup=False))
    manager._graphs_captured = True


def provide() -> None:
    """Let engines of this process capture graphs."""
    platform: Any = EmulatedXpuPlatform
    platform.support_static_graph_mode = classmethod(lambda cls: True)
    platform._global_graph_pool = object()
    torch.xpu.is_current_stream_capturing = lambda: bool(CAPTURING)
    utilities: Any = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    utilities.CudaGraphManager.capture = capture


class RerunWorker(EmulatedXpuWorker):
    """A worker that captures when it is told to."""

    def capture(self) -> int:
        """What a start does with graphs; how many there are then."""
        self.model_runner.capture_model()
        return len(self.model_runner.cudagraph_manager.graphs)
