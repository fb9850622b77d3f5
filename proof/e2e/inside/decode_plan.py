# SPDX-License-Identifier: Apache-2.0
"""How an installed vLLM divides its decode into programs."""

import importlib
from typing import Any

CONFIG = "vllm.model_executor.kernels.xpu_dsv4._decode_config"


def split_no_keys() -> None:
    """Divide it as on a device that is full with one program for each tile of heads."""
    config: Any = importlib.import_module(CONFIG)
    config.XE_CORES = 0
