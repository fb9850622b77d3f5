# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The load formats whose checkpoints are checked."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHECKED = "+xpu_dsv4"
"""Behind the name of a format: its loader is this package's."""
FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
)
"""Those of safetensors that vLLM's default loader reads, as the user names them."""


def check_checkpoint(vllm_config: "VllmConfig") -> None:
    """Name the loader that checks, for the model and its draft."""
    speculation = vllm_config.speculative_config
    draft = getattr(speculation, "draft_load_config", None)
    for config in (vllm_config.load_config, draft):
        if config is not None and config.load_format in FORMATS:
            config.load_format += CHECKED
