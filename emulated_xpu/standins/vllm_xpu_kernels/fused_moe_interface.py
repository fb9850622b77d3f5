# SPDX-License-Identifier: Apache-2.0
"""Fused experts: `xpu_fused_moe` up to 0.1.7, `XpuFusedMoe` from 0.1.8 on."""

from emulated_xpu.fused_experts import XpuFusedMoe, xpu_fused_moe

__all__ = ["XpuFusedMoe", "xpu_fused_moe"]
