# SPDX-License-Identifier: Apache-2.0
"""Computations of the stand-ins, one op family a module."""

from emulated_xpu.ops import experts, fp8_bmm, indexer, inv_rope, mhc

__all__ = ["experts", "fp8_bmm", "indexer", "inv_rope", "mhc"]
