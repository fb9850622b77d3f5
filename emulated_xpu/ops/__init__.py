# SPDX-License-Identifier: Apache-2.0
"""Computations of the stand-ins, one op family a module."""

from emulated_xpu.ops import (
    device,
    experts,
    fp4,
    fp8_bmm,
    fp8_gemm,
    indexer,
    inv_rope,
    mhc,
    norms,
    quant,
    router,
)

__all__ = [
    "device",
    "experts",
    "fp4",
    "fp8_bmm",
    "fp8_gemm",
    "indexer",
    "inv_rope",
    "mhc",
    "norms",
    "quant",
    "router",
]
