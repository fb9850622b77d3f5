# SPDX-License-Identifier: Apache-2.0
"""Time calls on a device, and measure its roofline.

Times are medians in microseconds per call. Graph capture removes the host from the
measurement, so captured times count; without it, a short call is as slow as its
launches. Calls use several input sets in turn, so that no data stays in the last-level
cache from one call to the next.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
REPEATS = 15
BATCH_MICROSECONDS = 4000.0
GRAPHS = {"cuda": "CUDAGraph", "xpu": "XPUGraph"}
"""Class of a captured graph by kind of device; torch for XPU may have none."""


@dataclass(frozen=True)
class Roofline:
    """Measured ceilings of a device.

    Attributes:
        bandwidth: bytes read and written by a large copy, in bytes per second.
        matrix: bf16 multiply-adds by a large product, in floating-point operations
            per second.
    """

    bandwidth: float
    matrix: float

    def microseconds(self, traffic: float, operations: float) -> float:
        """The shortest time for `traffic` bytes and `operations` operations."""
        return 1e6 * max(traffic / self.bandwidth, operations / self.matrix)


class Clock:
    """Measures calls on one device; on a CPU, only enough for a dry run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self._module = getattr(torch, device.type)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.on_cpu:
            self._module.synchronize()

    def _span(self, call: Call, count: int) -> float:
        if self.on_cpu:
            started = time.perf_counter()
            for _ in range(count):
                call()
            return 1e6 * (time.perf_counter() - started) / count
        first = self._module.Event(enable_timing=True)
        last = self._module.Event(enable_timing=True)
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return 1e3 * float(first.elapsed_time(last)) / count

    def _median(self, call: Call) -> float:
        if self.on_cpu:
            return self._span(call, 1)
        self._span(call, 2)
        estimate = max(self._span(call, 3), 0.5)
        count = max(1, min(400, int(BATCH_MICROSECONDS / estimate)))
        return statistics.median(self._span(call, count) for _ in range(REPEATS))

    def direct(self, calls: Sequence[Call]) -> float:
        """Time of one call, launched by the host each time."""
        return self._median(lambda: [call() for call in calls]) / len(calls)

    def captured(self, calls: Sequence[Call]) -> float | None:
        """Time of one call inside a graph; None where there are no graphs."""
        module = self._module
        make = getattr(module, GRAPHS.get(self.device.type, ""), None)
        if make is None:
            return None
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            for call in calls:
                call()
        module.current_stream().wait_stream(side)
        graph = make()
        with module.graph(graph):
            for call in calls:
                call()
        return self._median(graph.replay) / len(calls)

    def roofline(self) -> Roofline:
        """Measure copy bandwidth and bf16 matrix rate with large random data."""
        size = 1 << 16 if self.on_cpu else 1 << 31
        copy = self._median(self._copy(size))
        side = 64 if self.on_cpu else 8192
        product = self._median(self._product(side))
        return Roofline(2 * size / copy * 1e6, 2 * side**3 / product * 1e6)

    def _copy(self, size: int) -> Call:
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        source.random_(0, 255)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _product(self, side: int) -> Call:
        a, b = (
            torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        return lambda: torch.matmul(a, b)
