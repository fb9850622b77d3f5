# SPDX-License-Identifier: Apache-2.0
"""`pytest -p standins.emulated_xpu.cpu_pytest_plugin`: tests see vLLM's CPU platform.

As with the emulated XPU, Triton's kernels are interpreted.
"""

import os

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_PLUGINS"] = "plain_cpu"


def pytest_configure(config: pytest.Config) -> None:
    """Repair the Triton interpreter before a test module imports a kernel."""
    from standins import interpreter, interpreter_speed

    interpreter.repair()
    interpreter_speed.speed_up()
