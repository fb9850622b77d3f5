# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the products of routed experts are shared by programs and sub-groups."""

import math
from dataclasses import dataclass

from .. import _device
from ._experts_kernels import MANY_ROWS
from ._experts_weights import LANES, TILE_K

SUB_GROUPS_A_CORE = 32
"""With fewer sub-groups on an Xe-core, more of them share the values along K."""
WARPS_ON_CUDA = 1024
"""So many warps an NVIDIA GPU has at least, if the values along K suffice."""
LONG = 64
"""With as many blocks along K, sub-groups always share them."""


@dataclass(frozen=True)
class Product:
    """How a launch shares a product.

    Attributes:
        warps_k: sub-groups that share the blocks along K.
        warps_n: sub-groups that share the columns.
        cols: pairs of groups of 16 columns of a sub-group, 1 or 2.
        even_k: whether `warps_k` divides the blocks along K.
        programs: over all columns.
        grf: registers of a thread.
        ahead: whether the code loads an iteration ahead, not the compiler.
        paired: whether values are unpacked two in a word, in bf16.
        stages: iterations that the compiler loads ahead, and this one.

    """

    warps_k: int
    warps_n: int
    cols: int
    even_k: bool
    programs: int
    grf: int
    ahead: bool
    paired: bool
    stages: int


def block_m(pairs: int, experts: int) -> int:
    """Pairs of a tile, if `pairs` pairs fall evenly on `experts` experts."""
    mean = pairs / max(min(pairs, experts), 1)
    for size, most in ((8, 4), (16, 12), (32, 28)):
        if mean <= most:
            return size
    return 64


def product(
    rows: int, tiles: int, depth: int, columns: int, device_type: str, bits: int = 4
) -> Product:
    """Of `tiles` tiles of `rows` pairs with `columns` columns of K `depth`, in codes of
    `bits` bits.

    A sub-group has as many columns as registers allow without a spill.
    """
    blocks, group_pairs = depth // TILE_K, columns // (2 * LANES)
    if device_type == "cuda":
        return _on_cuda(rows, tiles, blocks, group_pairs)
    cols = 2 if rows == 32 and bits == 4 else 1
    fewest = SUB_GROUPS_A_CORE * _device.xe_cores()
    if rows == 8 and 2 * tiles * group_pairs >= fewest:
        cols = 2
    if group_pairs % cols:
        cols = 1
    sub_groups = tiles * group_pairs // cols
    warps_k = 4 if blocks >= LONG and rows < MANY_ROWS else 1
    most = min(16, blocks)
    while warps_k < most and sub_groups * warps_k < fewest:
        warps_k *= 2
    warps_n = _dividing(group_pairs // cols, max(4 // warps_k, 1))
    programs = group_pairs // (cols * warps_n)
    grf = 256 if rows >= MANY_ROWS or bits == 8 else 128
    even_k = blocks % warps_k == 0
    return Product(warps_k, warps_n, cols, even_k, programs, grf, True, False, 1)


def _on_cuda(rows: int, tiles: int, blocks: int, group_pairs: int) -> Product:
    """What took the least time on an H200: the compiler loads ahead, through shared
    memory, where copies need no register."""
    cols = 1 if rows > MANY_ROWS or group_pairs % 2 else 2
    warps = tiles * group_pairs // cols
    warps_k, most = 1, min(4, blocks)
    while warps_k < most and warps * warps_k < WARPS_ON_CUDA:
        warps_k *= 2
    together = 4 if rows >= MANY_ROWS else 2
    warps_n = _dividing(group_pairs // cols, max(together // warps_k, 1))
    programs = group_pairs // (cols * warps_n)
    even_k = blocks % warps_k == 0
    return Product(warps_k, warps_n, cols, even_k, programs, 128, False, True, 3)


def _dividing(count: int, most: int) -> int:
    """The largest power of 2 up to `most`, itself one, that divides `count`."""
    return math.gcd(count, most)
