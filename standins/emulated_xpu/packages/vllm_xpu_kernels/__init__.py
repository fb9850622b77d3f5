# SPDX-License-Identifier: Apache-2.0
"""Stands in for vllm_xpu_kernels on a machine without an Intel GPU.

The environment variable `EMULATED_XPU_WRAPPERS` may name a folder with Python modules
of the real package. They win over the stand-ins, so that only the ops are emulated.
"""

import os

if _wrappers := os.environ.get("EMULATED_XPU_WRAPPERS"):
    __path__.insert(0, _wrappers)
