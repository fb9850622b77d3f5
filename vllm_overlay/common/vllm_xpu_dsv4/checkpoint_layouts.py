# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a layer is stored in the quantizations that DeepSeek-V4 runs with on XPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vllm.utils.math_utils import cdiv

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn
BYTES = (torch.uint8,)
_WORDS = (torch.int32,)
_WHOLE = (torch.float32,)
_INT4_A_WORD = 8
# Eight zero points in the middle, as the two formats of GPTQ spell them.
_MIDDLES = (0x77777777, 0x88888888 - 2**32)
# Sizes of blocks and groups that were run.
_BLOCK, _GROUP = (128, 128), 128
_FP8_NAN = 0x7F
_E8M0_NAN = 0xFF


@dataclass(frozen=True)
class Stored:
    """A tensor of a layer: the dtypes that are tested, and its shape; () is one value
    for the whole layer."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]

    def fits(self, tensor: torch.Tensor, shape_is_known: bool) -> bool:
        if tensor.dtype not in self.dtypes:
            return False
        if self.shape == ():
            return tensor.numel() == 1
        return not shape_is_known or tensor.shape == self.shape


Layout: TypeAlias = Callable[[int, int], dict[str, Stored]]
"""From rows and columns of a layer to its tensors, by the last part of their names."""


def fp8(rows_each: int, columns_each: int | None) -> Layout:
    """FP8 with a scale for so many rows and columns, None for all columns."""
    return lambda rows, columns: {
        "weight": Stored((E4M3,), (rows, columns)),
        "weight_scale": Stored(
            FLOATS, (cdiv(rows, rows_each), cdiv(columns, columns_each or columns))
        ),
    }


def modelopt_nvfp4(rows: int, columns: int) -> dict[str, Stored]:
    """NVFP4 as ModelOpt names its tensors."""
    return {
        "weight": Stored(BYTES, (rows, columns // 2)),
        "weight_scale": Stored((E4M3,), (rows, columns // 16)),
        "weight_scale_2": Stored(_WHOLE, ()),
        "input_scale": Stored(_WHOLE, ()),
    }


def nvfp4(rows: int, columns: int) -> dict[str, Stored]:
    """NVFP4 as compressed-tensors names its tensors."""
    return {
        "weight_packed": Stored(BYTES, (rows, columns // 2)),
        "weight_scale": Stored((E4M3,), (rows, columns // 16)),
        "weight_global_scale": Stored(_WHOLE, ()),
        "input_global_scale": Stored(_WHOLE, ()),
    }


def mxfp4(rows: int, columns: int) -> dict[str, Stored]:
    """MXFP4 as compressed-tensors names its tensors."""
    return {
        "weight_packed": Stored(BYTES, (rows, columns // 2)),
        "weight_scale": Stored(BYTES, (rows, columns // 32)),
    }


def mxfp8(rows: int, columns: int) -> dict[str, Stored]:
    """MXFP8 as compressed-tensors names its tensors."""
    return {
        "weight": Stored((E4M3,), (rows, columns)),
        "weight_scale": Stored(BYTES, (rows, columns // 32)),
    }


def int4(group: int) -> Layout:
    """INT4 as compressed-tensors names its tensors."""
    return lambda rows, columns: {
        "weight_packed": Stored(_WORDS, (rows, columns // _INT4_A_WORD)),
        "weight_scale": Stored(FLOATS, (rows, columns // group)),
        "weight_shape": Stored((torch.int64, torch.int32), (2,)),
    }


def gptq(group: int) -> Layout:
    """INT4 as GPTQ and AutoRound store it: rows are inputs."""
    return lambda rows, columns: {
        "qweight": Stored(_WORDS, (columns // _INT4_A_WORD, rows)),
        "qzeros": Stored(_WORDS, (columns // group, rows // _INT4_A_WORD)),
        "scales": Stored(FLOATS, (columns // group, rows)),
        "g_idx": Stored(_WORDS, (columns,)),
    }


def layouts_of(quantization: dict[str, Any]) -> list[Layout]:
    """The layouts that layers of a checkpoint may have, by `quantization_config`.

    Empty where nothing is quantized, for DeepSeek's own FP8, and for what the model
    refuses before weights are loaded.
    """
    method = quantization.get("quant_method") or ""
    if method == "compressed-tensors":
        groups = quantization.get("config_groups", {}).values()
        found = (_of_compressed_tensors(group.get("weights")) for group in groups)
        return [layout for layout in found if layout]
    if method in ("auto-round", "inc") or method.endswith("gptq"):
        return [gptq(_GROUP)]
    if method.startswith("modelopt") or "quantization" in quantization:
        return [modelopt_nvfp4]
    return []


def _of_compressed_tensors(weights: dict[str, Any] | None) -> Layout | None:
    if not weights:
        return None
    kind = weights["num_bits"], weights["type"], weights["strategy"]
    if kind == (8, "float", "channel"):
        return fp8(1, None)
    if kind == (8, "float", "block"):
        return fp8(*_BLOCK)
    if kind == (8, "float", "group"):
        return mxfp8
    if kind == (4, "float", "tensor_group"):
        return nvfp4
    if kind == (4, "float", "group"):
        return mxfp4
    if kind == (4, "int", "group"):
        return int4(_GROUP)
    return None


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse values that no kernel reads as the checkpoint means them.

    Raises:
        ValueError: The message names the tensor.

    """
    leaf = name.rpartition(".")[2]
    if leaf == "qzeros":
        if not any((tensor == middle).all() for middle in _MIDDLES):
            raise ValueError(
                f"{name} has zero points beside the middle, which XPU takes for all"
            )
    elif leaf == "g_idx":
        columns = torch.arange(len(tensor), dtype=tensor.dtype, device=tensor.device)
        if not torch.equal(tensor, columns // _GROUP):
            raise ValueError(
                f"{name} does not go up by groups of columns, as XPU takes them"
            )
    elif "scale" in leaf:
        _check_scale(name, tensor, may_be_negative=leaf == "scales")


def _check_scale(name: str, scale: torch.Tensor, may_be_negative: bool) -> None:
    """AutoRound's scales may be negative: with them the codes reach -8 on either
    side."""
    if scale.dtype == torch.uint8:
        bad = scale == _E8M0_NAN
    elif scale.dtype == E4M3:
        bad = scale.view(torch.uint8) & _FP8_NAN == _FP8_NAN
    else:
        bad = ~scale.isfinite()
        if not may_be_negative:
            bad |= scale < 0
    if bad.any():
        raise ValueError(f"{name} has a scale that is negative or not finite")
