# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the tensor of a checkpoint that cannot be loaded."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import regex as re
import torch

_Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]

_SENTENCE_END = re.compile(r"\n|(?<=\.)\s+(?=[A-Z])")


class Following:
    """The tensor that a model has taken, and not done with."""

    def __init__(self) -> None:
        self._current = ""

    def followed(self, weights: _Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, by their names in the checkpoint."""
        for name, tensor in weights:
            self._current = f"{name} ({tensor.dtype}, {tuple(tensor.shape)})"
            yield name, tensor
            self._current = ""

    def blame(self, error: Exception) -> None:
        """Name the tensor at which loading failed.

        Raises:
            ValueError: the tensor does not fit. An error of another cause, such as too
                little memory, gets a note that names it.

        """
        if not self._current:
            return
        if not _is_of_the_tensor(error):
            error.add_note(f"This happened while {self._current} was loaded")
            return
        raise ValueError(
            f"{self._current} of the checkpoint cannot be loaded: "
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
