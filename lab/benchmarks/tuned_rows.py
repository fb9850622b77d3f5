# SPDX-License-Identifier: Apache-2.0
"""What a sweep's file holds: measured configurations, each for a range of heads.

{"schema": 2, "device": "Intel(R) Arc(TM) Pro B60 Graphics",
 "rows": {"sparse_decode": [{"least_heads": 1, ...}]}}
"""

from typing import NamedTuple

from kernels.xpu_dsv4._launch import cdiv
from kernels.xpu_dsv4.mla._decode_config import DecodeConfig, share_keys
from kernels.xpu_dsv4.mla._merge import MOST_SPLITS
from kernels.xpu_dsv4.mla._prefill_config import PrefillConfig

SCHEMA = 2


def file_name(device_name: str) -> str:
    """The name of a device's file: `intel-r-arc-tm-pro-b60-graphics.json`."""
    plain = (c if c.isascii() and c.isalnum() else " " for c in device_name.lower())
    return "-".join("".join(plain).split()) + ".json"


class TunedDecode(NamedTuple):
    """Fields as in `DecodeConfig`; `programs` fill the device and decide the splits."""

    least_heads: int
    most_heads: int
    block_h: int
    block_n: int
    programs: int
    num_warps: int
    num_stages: int
    grf: int
    q_blocks: bool

    def config(
        self, num_tokens: int, num_heads: int, max_keys: int, aligned: bool = True
    ) -> DecodeConfig:
        """This configuration for one launch; arguments as for `decode_config`."""
        return DecodeConfig(
            self.block_h,
            self.block_n,
            share_keys(
                num_tokens * cdiv(num_heads, self.block_h),
                cdiv(max_keys, self.block_n),
                self.programs,
                MOST_SPLITS,
            ),
            self.num_warps if aligned or not self.q_blocks else 2 * self.num_warps,
            self.num_stages,
            self.grf,
            self.q_blocks and aligned,
        )


class TunedPrefill(NamedTuple):
    """Fields as in `PrefillConfig`."""

    least_heads: int
    most_heads: int
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    grf: int
    q_blocks: bool

    def config(
        self, num_heads: int, aligned: bool = True, packed: bool = True
    ) -> PrefillConfig:
        """This configuration for one launch; arguments as for `prefill_config`."""
        return PrefillConfig(
            self.block_h,
            self.block_n,
            self.num_warps if aligned or not self.q_blocks else 2 * self.num_warps,
            self.num_stages,
            self.grf,
            self.q_blocks and aligned,
        )
