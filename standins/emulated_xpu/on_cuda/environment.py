# SPDX-License-Identifier: Apache-2.0
"""Import this before vllm and triton: the process sees an XPU on its NVIDIA GPU."""

import os
import sys

from standins.emulated_xpu.plugin import PACKAGES

os.environ.pop("TRITON_INTERPRET", None)
os.environ["VLLM_PLUGINS"] = "emulated_xpu_on_cuda"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM inspects models in a subprocess, which needs the stand-ins as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (os.environ.get("PYTHONPATH", ""), str(PACKAGES)) if part
)
sys.path.insert(0, str(PACKAGES))
