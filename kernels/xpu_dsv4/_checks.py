# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Argument checks: a ValueError names the argument, its value and the expectation."""

from collections.abc import Callable
from typing import NoReturn

import torch

ALIGNMENT = 64
"""Bytes; an address matters to a check only by its remainder."""
MOST_LAYOUTS = 4096
"""Layouts to remember. A server has a few per batch size."""
_passed: set[tuple[object, ...]] = set()


def check_once(check: Callable[..., None], *arguments: object) -> None:
    """Call `check(*arguments)` unless it passed for arguments of this layout before.

    The layout of a tensor is its type, shape, strides, device and alignment. A check
    must depend on nothing else of it, and must not read its values.
    """
    parts: list[object] = [check]
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            parts += (
                argument.dtype,
                argument.shape,
                argument.stride(),
                argument.device,
                argument.data_ptr() % ALIGNMENT,
            )
        else:
            parts.append(argument)
    layout = tuple(parts)
    if layout in _passed:
        return
    check(*arguments)
    if len(_passed) >= MOST_LAYOUTS:
        _passed.clear()
    _passed.add(layout)


def fail(name: str, value: object, expected: str) -> NoReturn:
    """Raise ValueError for argument `name`."""
    raise ValueError(f"{name} = {value}: expected {expected}")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise unless `tensor.dtype` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        fail(f"{name}.dtype", tensor.dtype, " or ".join(str(d) for d in dtypes))


def check_shape(name: str, tensor: torch.Tensor, *sizes: int | None) -> None:
    """Raise unless `tensor.shape` equals `sizes`; None matches any size."""
    shape = tuple(tensor.shape)
    if len(shape) != len(sizes) or any(
        want is not None and have != want
        for have, want in zip(shape, sizes, strict=True)
    ):
        want = ", ".join("*" if s is None else str(s) for s in sizes)
        fail(f"{name}.shape", list(shape), f"[{want}]")


def check_inner_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the last dimension of `tensor` has stride 1."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(f"{name}.stride()", tuple(tensor.stride()), "a last stride of 1")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise unless all given tensors share the device of the first."""
    first_name, first = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first_name, first = name, tensor
        elif tensor.device != first.device:
            fail(
                f"{name}.device", tensor.device, f"{first.device}, that of {first_name}"
            )


def check_index_rows(name: str, indices: torch.Tensor, num_tokens: int) -> None:
    """Raise unless `indices` is `[num_tokens, width]` or `[num_tokens, 1, width]`."""
    check_dtype(name, indices, torch.int32, torch.int64)
    has_axis = indices.dim() == 3 and indices.shape[1] == 1
    if not (has_axis or indices.dim() == 2) or indices.shape[0] != num_tokens:
        fail(
            f"{name}.shape",
            list(indices.shape),
            f"[{num_tokens}, width] or [{num_tokens}, 1, width]",
        )
    check_inner_contiguous(name, indices)
