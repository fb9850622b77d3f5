# SPDX-License-Identifier: Apache-2.0
"""A faster Triton interpreter: it computes once what it used to compute at every step.

A program of a few dozen operations takes milliseconds under the interpreter. Most of
the time goes into types, casts and broadcasts that are worked out anew for each
operation, into overflow checks whose result nobody reads, and into replacing the
functions of `triton.language` at each launch and at each call of a device function.
Nothing here changes a value that a kernel computes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

from standins.interpreter_replay import replayed

_MARK = "_sped_up_by_xpu_dsv4"
_TYPE_FIELDS = {"element_ty", "shape", "numel", "name"}
_LIMIT = 4096
"""Most entries of a cache whose keys come from a kernel's data."""
_TENSOR_FIELDS = {"handle", "shape", "numel", "type", "dtype"}


def speed_up() -> None:
    """Make the interpreter of Triton 3.6 to 3.9 faster; a second call does nothing.

    A part that another version of Triton implements differently stays as it is.
    """
    if getattr(interpreter, _MARK, False):
        return
    tl.block_type.__init__ = _cached_type(tl.block_type.__init__)
    tl.block_type.to_ir = _own_ir(tl.block_type.to_ir)
    tl.tensor.__init__ = _cached_shape(tl.tensor.__init__)
    interpreter._get_np_dtype = _cached_dtype(interpreter._get_np_dtype)
    semantic = interpreter.interpreter_semantic
    check = semantic.binary_op_sanitize_overflow_impl
    semantic.binary_op_sanitize_overflow_impl = _when_debugging(check)
    builder = interpreter.InterpreterBuilder
    builder.create_splat = _splat
    builder.create_broadcast = _broadcast
    builder.create_expand_dims = _expand_dims
    if hasattr(interpreter, "ReduceOps"):
        interpreter.ReduceOps.generic_reduce = _reduce
    handle = interpreter.TensorHandle
    handle.__init__ = _checked_handle(handle.__init__)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_attr = _patch_attr
        interpreter._patch_lang = LanguagePatch(interpreter._patch_lang)
    setattr(interpreter, _MARK, True)


class LanguagePatch:
    """In place of `_patch_lang`: it replaces `triton.language` once per launch.

    At the first launch, Triton patches the language and every change is recorded; later
    launches apply the recorded changes. Device functions called within a launch find
    the language replaced already.
    """

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self._original = original
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._active = False

    def __call__(self, fn: Any) -> Any:
        """Replace the language; `restore()` of the result undoes it."""
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
        """Restore `triton.language` as it was before the launch."""
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
        """Do nothing: the launch that replaced the language restores it."""


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, but calls are recorded and replayed."""
    scope.set_attr(owner, name, replayed(getattr(member, "__wrapped__", member)))


def _when_debugging(original: Callable[..., None]) -> Callable[..., None]:
    """The overflow check only in debug mode: otherwise Triton drops its result."""

    def binary_op_sanitize_overflow_impl(*args: Any) -> None:
        if interpreter.interpreter_builder.options.debug:
            original(*args)

    return binary_op_sanitize_overflow_impl


def _splat(builder: Any, kind: Any, scalar: Any) -> Any:
    """In place of `create_splat`: a view of one number instead of a filled block."""
    dtype = scalar.dtype.scalar
    number = scalar.data.astype(interpreter._get_np_dtype(dtype), copy=False)
    return interpreter.TensorHandle(_broadcast_view(number, kind.shape.values), dtype)


def _broadcast(builder: Any, block: Any, shape: Any) -> Any:
    """In place of `create_broadcast`: `np.broadcast_to` is slower than this view."""
    data = _broadcast_view(block.data, shape)
    return interpreter.TensorHandle(data, block.dtype.scalar)


def _expand_dims(builder: Any, block: Any, axis: int) -> Any:
    """In place of `create_expand_dims`: `np.expand_dims` is slower than an index."""
    data = block.data[(slice(None),) * axis + (None,)]
    return interpreter.TensorHandle(data, block.dtype.scalar)


def _reduce(self: Any, values: tuple[Any, ...]) -> list[Any]:
    """`ReduceOps.generic_reduce`, with one call of the combining function for all that
    lie at the same place of the axis, instead of one for each element."""
    values, axis = self.unravel(values, self.axis)
    along = [np.moveaxis(value.handle.data, axis, 0) for value in values]
    shape = along[0].shape[1:]

    def tensors(blocks: Iterable[Any]) -> list[Any]:
        pairs = zip(blocks, values, strict=True)
        return [self.to_tensor(block, value.dtype) for block, value in pairs]

    def block(part: Any) -> np.ndarray:
        data = part.handle.data if isinstance(part, tl.tensor) else part
        return np.broadcast_to(data, shape) if shape else np.reshape(data, ())

    total = tensors(data[0] for data in along)
    for place in range(1, len(along[0])):
        made = self.combine_fn.fn(*total, *tensors(data[place] for data in along))
        total = tensors(map(block, made if isinstance(made, tuple) else (made,)))
    blocks = [block(part) for part in total]
    if self.keep_dims:
        blocks = [np.expand_dims(data, axis) for data in blocks]
    return tensors(blocks)


def _checked_handle(original: Callable[..., None]) -> Callable[..., None]:
    """The original is called where its check of the width may fail."""

    def __init__(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        bits = 8 * data.itemsize
        if bits > 8 and type(dtype) is tl.dtype and bits > dtype.primitive_bitwidth:
            original(self, data, dtype)
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    return __init__


def _broadcast_view(values: np.ndarray, shape: Any) -> np.ndarray:
    """A view of `values` that is broadcast to `shape`."""
    if not values.flags.c_contiguous:
        view: np.ndarray = np.broadcast_to(values, shape)
        return view
    missing = len(shape) - values.ndim
    steps = zip(values.shape, values.strides, strict=True)
    strides = (0,) * missing + tuple([0 if n == 1 else step for n, step in steps])
    return np.ndarray(shape, values.dtype, values, 0, strides)


def _own_ir(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The block type itself where the interpreter's builder would make an equal one."""

    def to_ir(self: Any, builder: Any) -> Any:
        if builder is interpreter.interpreter_builder:
            return self
        return original(self, builder)

    return to_ir


def _cached_type(original: Callable[..., None]) -> Callable[..., None]:
    """Cache the shape, size and name of a block type by its sizes."""
    by_sizes: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    by_id: dict[int, tuple[Any, Any, str]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        found = by_id.get(id(shape))
        if found is None or found[0] is not shape:
            sizes = tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape)
            found = by_sizes.get(sizes)
        if found is not None:
            self.element_ty = element_ty
            self.shape, self.numel, text = found
            self.name = f"<{text}, {element_ty}>"
            return
        original(self, element_ty, shape)
        text = str(self.shape)
        if vars(self).keys() == _TYPE_FIELDS and self.name == f"<{text}, {element_ty}>":
            found = self.shape, self.numel, text
            by_sizes[sizes] = by_id[id(self.shape)] = found

    return __init__


def _cached_shape(original: Callable[..., None]) -> Callable[..., None]:
    """Cache the shape and size of a tensor by the shape of its type."""
    known: dict[int, tuple[Any, Any, Any]] = {}

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
        if len(known) < _LIMIT and vars(self).keys() == _TENSOR_FIELDS:
            known[id(shape)] = (shape, self.numel, self.shape)

    return __init__


def _cached_dtype(
    original: Callable[[Any], np.dtype[Any]],
) -> Callable[[Any], np.dtype[Any]]:
    """Cache the numpy dtype of a Triton type by its name."""
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
