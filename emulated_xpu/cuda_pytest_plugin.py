# SPDX-License-Identifier: Apache-2.0
"""`pytest -p emulated_xpu.cuda_pytest_plugin`: tests see vLLM's own CUDA platform, on a
real GPU, without vLLM's compiled ops.

A wheel for XPU does not have these. Triton's kernels are compiled and run. What calls
an op of vLLM's ends with torch's own error that there is none.
"""

import os
import sys
from types import ModuleType

os.environ["VLLM_PLUGINS"] = "plain_cuda"
# The platform imports it for the ops that it registers.
sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
