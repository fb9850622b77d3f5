# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's platform for XPU, which checks at the start what DeepSeek-V4 asks for."""

import os
from typing import TYPE_CHECKING

from vllm.platforms.xpu import XPUPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRAPH_CHECK = "VLLM_XPU_GRAPH_CHECK"
"""The variable that says what to do about a captured graph that differs."""
WORKER = "vllm_xpu_dsv4.worker.DeepSeekV4XPUWorker"


class DeepSeekV4XPUPlatform(XPUPlatform):
    """Each override calls vLLM's own method."""

    checks_deepseek_v4 = True

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse what the model cannot serve, before a worker starts, and name a worker
        that compares captured graphs with eager execution."""
        # They import what asks for the current platform.
        from vllm_xpu_dsv4.releases import COMPARES_GRAPHS
        from vllm_xpu_dsv4.start import check_start, model_of

        check_start(vllm_config)
        parallel = vllm_config.parallel_config
        if COMPARES_GRAPHS and model_of(vllm_config) and parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        super().check_and_update_config(vllm_config)

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Let vLLM, which refuses what it does not know, look at the other variables
        alone."""
        value = os.environ.pop(GRAPH_CHECK, None)
        try:
            super().validate_environ(hard_fail)
        finally:
            if value is not None:
                os.environ[GRAPH_CHECK] = value
