# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the tensor of a checkpoint that does not fit, or that has no scale."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, cast

import regex as re
import torch
from torch import nn

_Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]

_CODES = ("qweight", "weight_packed")
_SCALES = ("scale", "scales", "weight_scale", "weight_scale_inv")
_SHOWN = 5
_SENTENCE_END = re.compile(r"\n|(?<=\.)\s+(?=[A-Z])")


def load_checked(model: nn.Module, weights: _Tensors) -> set[str] | None:
    """Load all tensors of a checkpoint, and name the one at which that fails.

    A model class whose `requires_scales` is true has no use for a quantized weight
    without a scale beside it. Most loaders would leave the scale uninitialized.

    Raises:
        ValueError: a tensor cannot be loaded, or a scale is missing.

    """
    load = cast(Callable[[_Tensors], set[str] | None], model.load_weights)
    quantized: dict[str, str] = {}
    scaled: set[str] = set()
    current = ""

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in weights:
            current = f"{name} ({tensor.dtype}, {tuple(tensor.shape)})"
            layer, _, leaf = name.rpartition(".")
            if leaf in _SCALES:
                scaled.add(layer)
            elif leaf in _CODES or (leaf == "weight" and tensor.itemsize == 1):
                quantized[layer] = name
            yield name, tensor
            current = ""

    try:
        loaded = load(noted())
    except Exception as error:
        if not current:
            raise
        raise ValueError(
            f"{current} of the checkpoint cannot be loaded: "
            f"{type(error).__name__}: {_reason(error)}"
        ) from error
    missing = [name for layer, name in quantized.items() if layer not in scaled]
    if missing and getattr(model, "requires_scales", False):
        shown = ", ".join(missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(f"The checkpoint has no scale for {shown}{more}")
    return loaded


def _reason(error: Exception) -> str:
    """The first sentence of an error. A list of all parameters may follow it, which
    stays in the traceback."""
    return _SENTENCE_END.split(str(error), maxsplit=1)[0]
