# SPDX-License-Identifier: Apache-2.0
"""A launch reads pinned memory of the host, and raises where it is pageable."""

import pytest
import torch
import triton
import triton.language as tl
from own_process import in_own_process

from standins.emulated_xpu import device_api


@triton.jit
def _copy_kernel(host_ptr, target_ptr):
    tl.store(target_ptr, tl.load(host_ptr))


def launch(pin_memory: bool) -> tuple[int, bool]:
    device_api.provide_pinned_memory()
    source = torch.full((2,), 7, pin_memory=pin_memory)[1:]
    target = torch.zeros(1, dtype=torch.int64)
    _copy_kernel[(1,)](source, target)
    return int(target), source.is_pinned()


def test_pinned_memory_is_read() -> None:
    assert in_own_process(launch, True) == (7, True)


def test_a_launch_that_reads_pageable_memory_raises() -> None:
    with pytest.raises(ValueError, match=r"_copy_kernel: host_ptr, \[1\], lies in pag"):
        in_own_process(launch, False)


def copies() -> tuple[bool, bool, bool]:
    device_api.provide()
    device_api.provide_pinned_memory()
    pageable = torch.ones(3)
    pinned = pageable.pin_memory()
    again = pinned.pin_memory().data_ptr() == pinned.data_ptr()
    copied = pinned.data_ptr() != pageable.data_ptr()
    return again and copied, pinned[1:].is_pinned(), pageable.is_pinned()


def test_a_copy_is_pinned_once() -> None:
    assert in_own_process(copies) == (True, True, False)
