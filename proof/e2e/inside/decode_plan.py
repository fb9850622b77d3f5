# SPDX-License-Identifier: Apache-2.0
"""How an installed vLLM divides its decode into programs."""

import importlib
from typing import Any

DEVICE = "vllm.model_executor.kernels.xpu_dsv4._device"


def split_no_keys() -> None:
    """Divide it as on a device that is full with one program for each tile of heads."""
    device: Any = importlib.import_module(DEVICE)
    device.XE_CORES = 0
