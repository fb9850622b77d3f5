# SPDX-License-Identifier: Apache-2.0
"""Queries about the device, and views of its memory."""

import torch

from standins.emulated_xpu.architectures import answer
from standins.emulated_xpu.wheel.implementations import implements


@implements("_xpu_C::is_xe2_arch")
def is_xe2_arch(device_index: int = -1) -> bool:
    return answer("_xpu_C::is_xe2_arch")


@implements("_xpu_C::is_xe3_arch")
def is_xe3_arch(device_index: int = -1) -> bool:
    return answer("_xpu_C::is_xe3_arch")


@implements("_xpu_C::is_pvc")
def is_pvc(device_index: int = -1) -> bool:
    return answer("_xpu_C::is_pvc")


@implements("_xpu_C::is_bmg")
def is_bmg(device_index: int = -1) -> bool:
    return answer("_xpu_C::is_bmg")


@implements("_xpu_C::is_bmg_g21")
def is_bmg_g21(device_index: int = -1) -> bool:
    return answer("_xpu_C::is_bmg_g21")


@implements("_xpu_C::is_bmg_g31")
def is_bmg_g31(device_index: int = -1) -> bool:
    return answer("_xpu_C::is_bmg_g31")


@implements("_C::weak_ref_tensor")
def weak_ref_tensor(input: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory."""
    return input.view_as(input)


@implements("_C::get_xpu_view_from_cpu_tensor")
def get_xpu_view_from_cpu_tensor(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """The device's view of host memory: the same memory."""
    return cpu_tensor.view_as(cpu_tensor)
