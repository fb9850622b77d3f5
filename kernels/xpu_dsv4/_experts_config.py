# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the products of routed experts are shared by programs and sub-groups."""

from dataclasses import dataclass

from ._experts_weights import LANES, TILE_K
from ._launch import cdiv

FEWEST_SUB_GROUPS = 1024
"""With fewer sub-groups in a launch, more of them share the values along K."""


@dataclass(frozen=True)
class Product:
    """How a launch shares a product.

    Attributes:
        warps_k: sub-groups that share the blocks along K.
        warps_n: sub-groups that share the columns.
        cols: groups of 16 columns of a sub-group.
        even_k: whether `warps_k` divides the blocks along K.
    """

    warps_k: int
    warps_n: int
    cols: int
    even_k: bool

    def grid(self, columns: int) -> int:
        """Programs over `columns` columns."""
        return cdiv(columns, LANES * self.cols * self.warps_n)


def block_m(pairs: int, experts: int) -> int:
    """Pairs of a tile, if `pairs` pairs fall evenly on `experts` experts."""
    mean = pairs / max(min(pairs, experts), 1)
    if mean <= 4:
        return 8
    return 16 if mean <= 12 else 32


def gate_up(tiles: int, depth: int, columns: int) -> Product:
    """Of the product with K `depth` and `columns` columns of SwiGLU."""
    cols = 2 if tiles * columns // LANES >= FEWEST_SUB_GROUPS else 1
    warps_k = 4
    groups = tiles * columns // (LANES * cols)
    while warps_k < 16 and groups * warps_k < FEWEST_SUB_GROUPS:
        warps_k *= 2
    return Product(warps_k, 1, cols, depth // TILE_K % warps_k == 0)


def down(tiles: int, depth: int, columns: int) -> Product:
    """Of the product with K `depth` and `columns` columns."""
    blocks = depth // TILE_K
    cols = 2
    while columns // LANES % cols:
        cols //= 2
    groups = tiles * columns // (LANES * cols)
    warps_k = 1
    while (
        warps_k < 8
        and blocks % (2 * warps_k) == 0
        and groups * warps_k < FEWEST_SUB_GROUPS
    ):
        warps_k *= 2
    warps_n = 4 // warps_k if warps_k < 4 else 1
    while columns // LANES % (cols * warps_n):
        warps_n //= 2
    return Product(warps_k, warps_n, cols, True)
