# SPDX-License-Identifier: Apache-2.0
"""A worker that is told how much memory a step leaves: the emulated device has none."""

import os

from vllm.config import set_current_vllm_config

from proof.e2e.inside.recording import RecordingWorker


class ToldMemoryWorker(RecordingWorker):
    """Profiles as the base class does, and answers with `E2E_MEMORY_LEFT` bytes."""

    def determine_available_memory(self) -> int:
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        return int(os.environ["E2E_MEMORY_LEFT"])
