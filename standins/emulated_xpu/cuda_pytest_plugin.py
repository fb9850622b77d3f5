# SPDX-License-Identifier: Apache-2.0
"""`pytest -p standins.emulated_xpu.cuda_pytest_plugin`: tests see vLLM's own CUDA
platform, on a real GPU, without vLLM's compiled ops.

A wheel for XPU does not have these. Triton's kernels are compiled and run. Modules of
compiled ops are empty, and what asks whether an op of CUTLASS is there hears no. What
calls one ends with torch's own error.
"""

import os
import sys
from types import ModuleType

import torch

os.environ["VLLM_PLUGINS"] = "plain_cuda"
for _name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"):
    sys.modules[_name] = ModuleType(_name)
_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
_library = torch.library.Library("_C", "FRAGMENT")
for _name in _QUESTIONS:
    _library.define(f"{_name}(int cuda_device_capability) -> bool")
    _library.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
