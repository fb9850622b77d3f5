# SPDX-License-Identifier: Apache-2.0
"""Record which bytes a kernel loads while the interpreter runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Loads:
    """The bytes that were requested, by address."""

    def __init__(self) -> None:
        self._bytes: list[np.ndarray] = []

    def add(self, addresses: np.ndarray, size: int) -> None:
        """`size` bytes from each of the addresses on."""
        first = addresses.reshape(-1, 1).astype(np.int64)
        self._bytes.append((first + np.arange(size)).ravel())

    @property
    def total(self) -> int:
        """How many bytes were requested, those of repeated requests included."""
        return sum(map(len, self._bytes))

    def within(self, tensor: torch.Tensor) -> dict[int, int]:
        """Offset in the storage of `tensor` -> times requested."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        parts = [part[(start <= part) & (part < end)] for part in self._bytes]
        found = np.concatenate([np.empty(0, np.int64), *parts]) - start
        offsets, times = np.unique(found, return_counts=True)
        return dict(zip(offsets.tolist(), times.tolist(), strict=True))


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
        loads.add(ptrs.data[chosen], size)
        return original(self, ptrs, mask, *rest)

    builder.create_masked_load = recorded
    try:
        yield loads
    finally:
        builder.create_masked_load = original
