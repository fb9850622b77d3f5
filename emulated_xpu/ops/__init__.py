# SPDX-License-Identifier: Apache-2.0
"""What computes the ops, one family a module. A new module is listed here."""

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
