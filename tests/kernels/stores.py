# SPDX-License-Identifier: Apache-2.0
"""Count what a kernel stores, byte by byte, while the interpreter runs it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def counting_stores() -> Iterator[Counter[int]]:
    """Yield a counter of stores by byte address; only under the interpreter."""
    from triton.runtime import interpreter

    counts: Counter[int] = Counter()
    builder = interpreter.InterpreterBuilder
    original = builder.create_masked_store

    def counted(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        chosen = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        for address in ptrs.data[chosen].ravel().tolist():
            counts.update(range(address, address + value.data.dtype.itemsize))
        return original(self, ptrs, value, mask, *rest)

    builder.create_masked_store = counted
    try:
        yield counts
    finally:
        builder.create_masked_store = original
