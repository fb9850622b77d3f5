# SPDX-License-Identifier: Apache-2.0
"""A quicker Triton interpreter: what it computes again at every step is remembered.

A program of a few dozen operations takes milliseconds under the interpreter, most of
them spent on the shapes of block types and on exchanging the functions of
`triton.language` at each launch and at each call of a device function. Nothing here
touches a value that a kernel computes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_MARK = "_quickened_by_xpu_dsv4"
_TYPE_FIELDS = {"element_ty", "shape", "numel", "name"}
_TENSOR_FIELDS = {"handle", "shape", "numel", "type", "dtype"}


def speed_up() -> None:
    """Make the interpreter of Triton 3.6 to 3.9 quicker; calling it again does nothing.

    A part whose insides look different in another Triton is left as it is.
    """
    if getattr(interpreter, _MARK, False):
        return
    tl.block_type.__init__ = _remembered_type(tl.block_type.__init__)
    tl.tensor.__init__ = _remembered_shape(tl.tensor.__init__)
    interpreter._get_np_dtype = _remembered_dtype(interpreter._get_np_dtype)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = LanguageExchange(interpreter._patch_lang)
    setattr(interpreter, _MARK, True)


class LanguageExchange:
    """In place of `_patch_lang`: `triton.language` is exchanged once per launch.

    The first launch lets Triton patch the language and notes every change; later ones
    apply the notes. Device functions called within a launch find it done.
    """

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self._original = original
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._active = False

    def __call__(self, fn: Any) -> Any:
        """Exchange the language; the result's `restore()` puts it back."""
        if self._active:
            return _AlreadyDone
        if self._changes:
            for owner, name, _, new in self._changes:
                setattr(owner, name, new)
        else:
            self._note_changes()
        self._active = True
        return self

    def restore(self) -> None:
        """Put `triton.language` back as it was before the launch."""
        self._active = False
        for owner, name, old, _ in reversed(self._changes):
            if old is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    def _note_changes(self) -> None:
        everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, old in self._original(everything)._changes:
            first.setdefault((id(owner), name), (owner, name, old))
        self._changes = [
            (owner, name, old, getattr(owner, name))
            for owner, name, old in first.values()
        ]


class _AlreadyDone:
    @staticmethod
    def restore() -> None:
        """The launch that exchanged the language restores it."""


def _remembered_type(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape)
        found = known.get(sizes)
        if found is not None:
            self.element_ty = element_ty
            self.shape, self.numel, text = found
            self.name = f"<{text}, {element_ty}>"
            return
        original(self, element_ty, shape)
        text = str(self.shape)
        if vars(self).keys() == _TYPE_FIELDS and self.name == f"<{text}, {element_ty}>":
            known[sizes] = (self.shape, self.numel, text)

    return __init__


def _remembered_shape(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[int, tuple[Any, Any, Any]] = {}
    limit = 4096

    def __init__(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        found = known.get(id(shape))
        if found is not None and found[0] is shape:
            self.handle = handle
            self.type = type
            self.dtype = type.scalar
            _, self.numel, self.shape = found
            return
        original(self, handle, type)
        if len(known) < limit and vars(self).keys() == _TENSOR_FIELDS:
            known[id(shape)] = (shape, self.numel, self.shape)

    return __init__


def _remembered_dtype(
    original: Callable[[Any], np.dtype[Any]],
) -> Callable[[Any], np.dtype[Any]]:
    known: dict[str, np.dtype[Any]] = {}

    def _get_np_dtype(tt_dtype: Any) -> np.dtype[Any]:
        if isinstance(tt_dtype, tl.block_type):
            tt_dtype = tt_dtype.element_ty
        if isinstance(tt_dtype, tl.pointer_type):
            return original(tt_dtype)
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = original(tt_dtype)
        return found

    return _get_np_dtype
