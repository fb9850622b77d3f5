# SPDX-License-Identifier: Apache-2.0
"""Record which bytes a kernel loads while the interpreter runs it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Loads:
    """Loads by byte address: `count` bytes requested, `touched` which ones."""

    def __init__(self) -> None:
        self.touched: Counter[int] = Counter()

    def within(self, tensor: torch.Tensor) -> dict[int, int]:
        """Offset in the storage of `tensor` -> times requested."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return {a - start: n for a, n in self.touched.items() if start <= a < end}


@contextmanager
def recording_loads() -> Iterator[Loads]:
    """Yield a record of every byte that a mask lets through; interpreter only."""
    from triton.runtime import interpreter

    loads = Loads()
    builder = interpreter.InterpreterBuilder
    original = builder.create_masked_load

    def recorded(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        size = max(ptrs.dtype.element_ty.primitive_bitwidth // 8, 1)
        chosen = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        for address in ptrs.data[chosen].ravel().tolist():
            for byte in range(address, address + size):
                loads.touched[byte] += 1
        return original(self, ptrs, mask, *rest)

    builder.create_masked_load = recorded
    try:
        yield loads
    finally:
        builder.create_masked_load = original
