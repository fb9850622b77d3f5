# SPDX-License-Identifier: Apache-2.0
"""What a process sees that runs vLLM's engine on the emulated XPU."""

from pathlib import Path

from xpustack.core.process import clean_environment

from .step_test import PIN_VARIABLE


def engine_environment(
    kernels: str, own: Path, path: tuple[Path, ...], **more: str
) -> dict[str, str]:
    """The environment of an engine.

    Args:
        kernels: version of vllm-xpu-kernels whose ops there are.
        own: where vLLM and Triton keep what they found.
        path: what is imported before the installed packages.
    """
    return clean_environment(
        **{PIN_VARIABLE: kernels},
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=":".join(map(str, path)),
        # Layers marked for compilation run as they stand.
        TORCHDYNAMO_DISABLE="1",
        TRANSFORMERS_OFFLINE="1",
        TRITON_CACHE_DIR=str(own / "triton"),
        TRITON_INTERPRET="1",
        VLLM_CACHE_ROOT=str(own / "cache"),
        VLLM_CONFIG_ROOT=str(own / "config"),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="emulated_xpu",
        **more,
    )
