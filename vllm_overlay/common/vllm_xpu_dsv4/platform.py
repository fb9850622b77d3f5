# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's platform for XPU, which checks at the start what DeepSeek-V4 asks for."""

from typing import TYPE_CHECKING

from vllm.platforms.xpu import XPUPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DeepSeekV4XPUPlatform(XPUPlatform):
    """Each override calls vLLM's own method."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse what the model cannot serve, before a worker starts."""
        # It imports what asks for the current platform.
        from vllm_xpu_dsv4.start import check_start

        check_start(vllm_config)
        super().check_and_update_config(vllm_config)
