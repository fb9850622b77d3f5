# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Formats of routed experts' weights, and which of them a call brings."""

from dataclasses import dataclass, replace

import torch

from .._checks import check_dtype


@dataclass(frozen=True)
class Format:
    """How weights are stored; their types alone tell the formats apart.

    Attributes:
        name: as kernels know it.
        bits: of a code.
        codes: type of a weight's tensor.
        scales: type of its scales' tensor.
        columns: neighbouring columns of the product that share a scale.
        values: neighbouring values of a column that do.

    """

    name: str
    bits: int
    codes: torch.dtype
    scales: torch.dtype
    columns: int
    values: int

    def width(self, depth: int) -> int:
        """Elements of a tensor of codes along K that hold `depth` values."""
        return depth * self.bits // 8


MXFP4 = Format("mxfp4", 4, torch.uint8, torch.uint8, 1, 32)
FP8 = Format("fp8", 8, torch.float8_e4m3fn, torch.float32, 128, 128)
INT4 = Format("int4", 4, torch.uint8, torch.bfloat16, 1, 128)
FORMATS = (MXFP4, FP8, INT4)


def format_of(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_block: tuple[int, int] | None = None,
) -> Format:
    """The format of `weight` with `scale`, whose blocks are `scale_block` if given.

    Raises:
        ValueError: naming the tensor whose type no format has.

    """
    check_dtype(name, weight, *dict.fromkeys(each.codes for each in FORMATS))
    known = [each for each in FORMATS if each.codes == weight.dtype]
    check_dtype(f"{name}_scale", scale, *(each.scales for each in known))
    (found,) = (each for each in known if each.scales == scale.dtype)
    if scale_block is None:
        return found
    return replace(found, columns=scale_block[0], values=scale_block[1])
