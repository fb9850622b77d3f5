# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the products of routed experts are shared by programs and sub-groups."""

from dataclasses import dataclass

from . import _decode_config
from ._experts_kernels import MANY_ROWS
from ._experts_weights import LANES, TILE_K

SUB_GROUPS_A_CORE = 32
"""With fewer sub-groups on an Xe-core, more of them share the values along K."""
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

    """

    warps_k: int
    warps_n: int
    cols: int
    even_k: bool
    programs: int
    grf: int


def block_m(pairs: int, experts: int) -> int:
    """Pairs of a tile, if `pairs` pairs fall evenly on `experts` experts."""
    mean = pairs / max(min(pairs, experts), 1)
    for size, most in ((8, 4), (16, 12), (32, 28)):
        if mean <= most:
            return size
    return 64


def product(rows: int, tiles: int, depth: int, columns: int) -> Product:
    """Of `tiles` tiles of `rows` pairs with `columns` columns of K `depth`.

    A sub-group has as many columns as registers allow without a spill.
    """
    blocks, group_pairs = depth // TILE_K, columns // (2 * LANES)
    cols = 2 if rows == 32 else 1
    fewest = SUB_GROUPS_A_CORE * _decode_config._xe_cores()
    if rows == 8 and 2 * tiles * group_pairs >= fewest:
        cols = 2
    if group_pairs % cols:
        cols = 1
    sub_groups = tiles * group_pairs // cols
    warps_k = 4 if blocks >= LONG and rows < MANY_ROWS else 1
    most = min(16, blocks)
    while warps_k < most and sub_groups * warps_k < fewest:
        warps_k *= 2
    warps_n = max(4 // warps_k, 1)
    while group_pairs % (cols * warps_n):
        warps_n //= 2
    programs = group_pairs // (cols * warps_n)
    grf = 256 if rows >= MANY_ROWS else 128
    return Product(warps_k, warps_n, cols, blocks % warps_k == 0, programs, grf)
