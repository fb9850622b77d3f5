# SPDX-License-Identifier: Apache-2.0
"""Host memory that the device reads."""

import torch

from standins.emulated_xpu.on_cuda.device_api import device_view
from standins.emulated_xpu.on_cuda.forms.table import device_form


@device_form("_C::get_xpu_view_from_cpu_tensor")
def get_xpu_view_from_cpu_tensor(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """The device's view of pinned host memory."""
    return device_view(cpu_tensor)
