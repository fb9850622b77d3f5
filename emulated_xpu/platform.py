# SPDX-License-Identifier: Apache-2.0
"""Entry point of group `vllm.platform_plugins`."""

import sys
from pathlib import Path

STANDINS = Path(__file__).parent / "standins"
"""Holds the package `vllm_xpu_kernels` that vLLM imports."""


def register() -> str:
    """Name the platform class to vLLM, and make its imports possible."""
    if str(STANDINS) not in sys.path:
        sys.path.insert(0, str(STANDINS))
    return "emulated_xpu.cpu_as_xpu.EmulatedXpuPlatform"
