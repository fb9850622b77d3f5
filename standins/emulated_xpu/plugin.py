# SPDX-License-Identifier: Apache-2.0
"""The entry point of the group `vllm.platform_plugins`.

vLLM calls it before it imports its platforms: it must not import vLLM.
"""

import os
import sys
from pathlib import Path

PACKAGES = Path(__file__).parent / "packages"
"""The folder with the package `vllm_xpu_kernels` that vLLM imports."""


def register() -> str:
    """Put the stand-in packages on the path and name the platform's class to vLLM."""
    _add_packages()
    # Without a driver vLLM has Triton only where no GPU is shown; Ray shows one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return "standins.emulated_xpu.platform.EmulatedXpuPlatform"


def register_on_cuda() -> str:
    """The same for an XPU whose tensors live on an NVIDIA GPU."""
    _add_packages()
    return "standins.emulated_xpu.on_cuda.platform.XpuPathOnCudaPlatform"


def register_cpu() -> str:
    """Name vLLM's own CPU platform to it, for what must work without an XPU."""
    return "vllm.platforms.cpu.CpuPlatform"


def register_cuda() -> str:
    """Name vLLM's own CUDA platform to it; `cuda_pytest_plugin` says what it lacks."""
    return "vllm.platforms.cuda.CudaPlatform"


def _add_packages() -> None:
    if str(PACKAGES) not in sys.path:
        sys.path.insert(0, str(PACKAGES))
