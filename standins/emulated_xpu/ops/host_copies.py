# SPDX-License-Identifier: Apache-2.0
"""Copies between the device and the host by their addresses, of vllm-xpu-kernels
0.1.15.4."""

import ctypes

import torch

from standins.emulated_xpu.wheel.implementations import implements

_registered: dict[int, int] = {}
"""Bytes of each range of host memory that the device was told of, by address."""


@implements("_C::xpu_host_register")
def xpu_host_register(ptr: int, n_bytes: int) -> bool:
    """Whether the range is registered now: one that is empty or was is not."""
    if not ptr or n_bytes <= 0 or ptr in _registered:
        return False
    _registered[ptr] = n_bytes
    return True


@implements("_C::xpu_host_unregister")
def xpu_host_unregister(ptr: int) -> bool:
    """Whether the range was registered until now."""
    return _registered.pop(ptr, None) is not None


@implements("_C_cache_ops::swap_blocks_batch")
def swap_blocks_batch(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor
) -> None:
    """Copy `sizes[i]` bytes from `src_ptrs[i]` to `dst_ptrs[i]`.

    All three are uint64 `[N]` on the host.

    Raises:
        ValueError: they are not.
    """
    for name, given in {"src": src_ptrs, "dst": dst_ptrs, "sizes": sizes}.items():
        on_host = given.device.type == "cpu" and given.is_contiguous()
        if not on_host or given.dtype != torch.uint64 or given.shape != sizes.shape:
            raise ValueError(f"swap_blocks_batch: {name} must be uint64 on the host")
    for source, target, size in zip(
        src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)
