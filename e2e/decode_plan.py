# SPDX-License-Identifier: Apache-2.0
"""For how many Xe-cores an installed vLLM divides its decode into programs."""

import importlib
from typing import Any

CONFIG = "vllm.model_executor.kernels.xpu_dsv4._decode_config"


def plan_decode(xe_cores: int) -> None:
    """Divide it as on a device of so many. On few, no keys are split, which the
    interpreter does slowly."""
    config: Any = importlib.import_module(CONFIG)
    config.XE_CORES = xe_cores
