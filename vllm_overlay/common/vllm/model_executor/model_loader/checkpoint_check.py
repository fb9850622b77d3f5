# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the tensor of a checkpoint that cannot be loaded."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, cast

import regex as re
import torch
from torch import nn

_Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]

_SENTENCE_END = re.compile(r"\n|(?<=\.)\s+(?=[A-Z])")


def load_named(model: nn.Module, weights: _Tensors) -> set[str] | None:
    """Load all tensors of a checkpoint, and name the one at which that fails.

    Args:
        model: takes the tensors by its `load_weights`.
        weights: tensors by their names in the checkpoint.

    Raises:
        ValueError: a tensor does not fit. An error of another cause, such as too little
            memory, keeps its type; a note of it names the tensor.

    """
    load = cast(Callable[[_Tensors], set[str] | None], model.load_weights)
    current = ""

    def followed() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in weights:
            current = f"{name} ({tensor.dtype}, {tuple(tensor.shape)})"
            yield name, tensor
            current = ""

    try:
        return load(followed())
    except Exception as error:
        if not current:
            raise
        if not _is_of_the_tensor(error):
            error.add_note(f"This happened while {current} was loaded")
            raise
        raise ValueError(
            f"{current} of the checkpoint cannot be loaded: "
            f"{type(error).__name__}: {_reason(error)}"
        ) from error


def _is_of_the_tensor(error: Exception) -> bool:
    """Whether a tensor's name, type or shape is the cause. Of RuntimeError, by which
    torch also tells of devices, only one about sizes is."""
    if type(error) is RuntimeError:
        return "size" in str(error)
    return isinstance(error, AssertionError | LookupError | TypeError | ValueError)


def _reason(error: Exception) -> str:
    """The first sentence of an error. A list of all parameters may follow it, which
    stays in the traceback."""
    return _SENTENCE_END.split(str(error), maxsplit=1)[0]
