# SPDX-License-Identifier: Apache-2.0
"""Fused experts."""

from standins.emulated_xpu.fused_experts import XpuFusedMoe

__all__ = ["XpuFusedMoe"]
