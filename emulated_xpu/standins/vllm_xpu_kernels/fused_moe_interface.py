# SPDX-License-Identifier: Apache-2.0
"""Fused experts: `xpu_fused_moe` up to 0.1.7, `XpuFusedMoe` from 0.1.8 on."""

from typing import Any, NoReturn

from emulated_xpu.fused_experts import XpuFusedMoe

__all__ = ["XpuFusedMoe", "xpu_fused_moe"]


def xpu_fused_moe(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("xpu_fused_moe on the emulated XPU")
