# SPDX-License-Identifier: Apache-2.0
"""The recording worker on an NVIDIA GPU, in eager mode and in captured graphs.

Hooks run while a graph is captured, not while it is replayed. Their copies are then
part of the graph, and each replay fills them anew: after it they are what the step
computed.
"""

from collections import Counter
from typing import Any

import torch
import triton

from proof.e2e.inside import blocks, recording
from standins.emulated_xpu.on_cuda.worker import XpuPathOnCudaWorker

replays: Counter[str] = Counter()
"""How often a graph was replayed, by the number of its tokens."""
_runners: list[Any] = []


class RecordedGraph(torch.cuda.CUDAGraph):
    """A graph whose replays are recorded."""

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self.entries: list[dict[str, Any]] = []
        recording.keep = self.entries.append
        super().capture_begin(*args, **kwargs)

    def capture_end(self) -> None:
        super().capture_end()
        recording.keep = recording.records.append

    def replay(self) -> None:
        super().replay()
        if not self.entries or not _runners:
            return
        replays[str(len(self.entries[0]["input"]))] += 1
        if recording.stopped:
            return
        rows = recording.rows_of_the_batch(_runners[0])
        for entry in self.entries:
            copied = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in entry.items()
            }
            recording.records.append(copied | {"rows": rows})


class RecordingOnCudaWorker(recording.Recording, XpuPathOnCudaWorker):
    """Records what compiled kernels computed."""

    keeps_parameters = False

    def init_device(self) -> None:
        torch.xpu.XPUGraph = RecordedGraph
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        triton.knobs.runtime.launch_enter_hook.add(_count_launch)
        super().load_model(*args, **kwargs)
        _runners.append(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """What the warm-up computed is no request's."""
        times = super().compile_or_warm_up_model()
        of_drafts = blocks.contexts, blocks.blocks
        for found in (recording.records, recording.logits, *of_drafts):
            found.clear()
        replays.clear()
        return times

    def recorded(self) -> bytes:
        """What any worker records, with `replays` among the launches."""
        for tokens, count in replays.items():
            recording.launches[f"replay of a graph of {tokens} tokens"] = count
        return super().recorded()


def _count_launch(metadata: Any) -> None:
    recording.launches[str(metadata.get()["name"])] += 1
