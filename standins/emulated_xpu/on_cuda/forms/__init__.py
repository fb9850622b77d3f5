# SPDX-License-Identifier: Apache-2.0
"""Stand-ins in a form that stays on the device.

No shape depends on a value, so nothing waits for the device and everything can be
captured into a graph. A stand-in of `standins.emulated_xpu.ops` that already works like
this is used unchanged. `test_device_forms.py` of the emulation's tests compares both on
the CPU.

| module | what it holds |
|---|---|
| `table` | which form computes which op |
| `pages` | writing rows into pages where some have no slot |
| `products` | FP8 products with dequantized weights |
| `experts` | routed experts: permutation and grouped product |
| `indexer` | gather of keys, logits and top-k |
| `compressor` | the compressed entry of a block of tokens |
"""

from standins.emulated_xpu.on_cuda.forms import (
    compressor,
    experts,
    indexer,
    kv_insert,
    memory,
    products,
)
from standins.emulated_xpu.on_cuda.forms.table import replace_stand_ins

__all__ = [
    "compressor",
    "experts",
    "indexer",
    "kv_insert",
    "memory",
    "products",
    "replace_stand_ins",
]
