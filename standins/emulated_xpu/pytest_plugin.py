# SPDX-License-Identifier: Apache-2.0
"""`pytest -p standins.emulated_xpu.pytest_plugin`: tests see an XPU where none is.

Import it before vllm and triton: on import, vLLM chooses its platform and decides
whether Triton is real. A process may import it ahead of pytest (PYTEST_DONT_REWRITE).
"""

import os
import sys
from pathlib import Path

import pytest

from standins.emulated_xpu.plugin import PACKAGES

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_PLUGINS"] = "emulated_xpu"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM inspects models in a subprocess, which needs the stand-ins as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (os.environ.get("PYTHONPATH", ""), str(PACKAGES)) if part
)
sys.path.insert(0, str(PACKAGES))


def pytest_configure(config: pytest.Config) -> None:
    """Repair the Triton interpreter before a test module imports a kernel."""
    prepare()


def prepare() -> None:
    """Repair and speed up the Triton interpreter; a second call does nothing."""
    from standins import interpreter, interpreter_speed

    interpreter.repair()
    interpreter_speed.speed_up()


def pytest_report_header(config: pytest.Config) -> str:
    """Name the emulation, and the version of the kernels package that it stands for."""
    from standins.emulated_xpu.wheel.pins import kernels_version

    return (
        "emulated XPU: CPU tensors, stand-ins for vllm_xpu_kernels"
        f" {kernels_version()} from {Path(__file__).parent.name}"
    )
