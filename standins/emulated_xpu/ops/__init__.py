# SPDX-License-Identifier: Apache-2.0
"""The functions that compute the ops, one op family per module.

List a new module here: importing this package registers its functions.
"""

from standins.emulated_xpu.ops import (
    compressor,
    device,
    experts,
    flash_attention,
    fp4,
    fp8_bmm,
    fp8_gemm,
    host_copies,
    indexer,
    int4,
    inv_rope,
    kv_insert,
    mhc,
    norms,
    quant,
    router,
    sampler,
)

__all__ = [
    "compressor",
    "device",
    "experts",
    "flash_attention",
    "fp4",
    "fp8_bmm",
    "fp8_gemm",
    "host_copies",
    "indexer",
    "int4",
    "inv_rope",
    "kv_insert",
    "mhc",
    "norms",
    "quant",
    "router",
    "sampler",
]
