# SPDX-License-Identifier: Apache-2.0
"""What a process sees that runs vLLM on the emulated XPU, on a CPU, or on CUDA."""

from collections.abc import Sequence
from pathlib import Path

from stack.core.process import clean_environment

PIN_VARIABLE = "EMULATED_XPU_KERNELS"
"""Tells the emulation which vllm-xpu-kernels it stands for."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
NO_DEVICE = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Layers marked for compilation run as they stand."""


def vllm_variables(
    kernels: str, plugin: str, own: Path, path: Sequence[Path]
) -> dict[str, str]:
    """The variables that any run of vLLM has.

    Args:
        kernels: version of vllm-xpu-kernels whose ops there are.
        plugin: the entry point of the platform.
        own: where vLLM and Triton keep what they found.
        path: what is imported before the installed packages.
    """
    return {
        **OFFLINE,
        PIN_VARIABLE: kernels,
        "PYTHONPATH": ":".join(map(str, path)),
        "TRITON_CACHE_DIR": str(own / "triton"),
        "VLLM_CACHE_ROOT": str(own / "cache"),
        "VLLM_CONFIG_ROOT": str(own / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": plugin,
    }


def engine_environment(
    kernels: str, own: Path, path: Sequence[Path], **more: str
) -> dict[str, str]:
    """The environment of an engine on the emulated XPU; arguments as of
    `vllm_variables`."""
    variables = vllm_variables(kernels, "emulated_xpu", own, path)
    variables |= {**NO_DEVICE, **NOT_COMPILED, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return clean_environment(**variables, **more)
