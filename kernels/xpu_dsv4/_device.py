# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How wide the XPU is."""

import functools

import torch

XE_CORES = 32
"""Xe-cores that are assumed where there is no XPU to ask, as of an Arc Pro B70."""
ENGINES = 8
"""Vector engines of an Xe-core."""


@functools.cache
def xe_cores() -> int:
    """Xe-cores of the XPU."""
    if not torch.xpu.is_available():
        return XE_CORES
    return torch.xpu.get_device_properties().max_compute_units // ENGINES
