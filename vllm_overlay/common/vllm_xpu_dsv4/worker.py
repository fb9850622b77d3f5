# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's worker for XPU, which compares its captured graphs at the end of a start."""

from typing import Any

from vllm.v1.worker.xpu_worker import XPUWorker
from vllm_xpu_dsv4.graph_check import check_captured_graphs


class ChecksGraphs:
    """Before the class of a worker."""

    model_config: Any
    model_runner: Any

    def compile_or_warm_up_model(self) -> Any:
        """The last of a start that a worker does: it captures the graphs."""
        done = super().compile_or_warm_up_model()  # type: ignore[misc]
        if not self.model_config.enforce_eager:
            check_captured_graphs(self.model_runner)
        return done


class DeepSeekV4XPUWorker(ChecksGraphs, XPUWorker):
    """The worker that the platform names for DeepSeek-V4 and V4.1."""
