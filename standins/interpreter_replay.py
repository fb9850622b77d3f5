# SPDX-License-Identifier: Apache-2.0
"""Operations of the Triton interpreter, recorded once and then replayed.

`x + y` in an interpreted kernel decides anew each time which types, casts and
broadcasts it needs, and then makes a few calls to the interpreter's builder, which
compute with numpy. What it decides depends only on types, shapes and constants. So the
builder's calls are recorded by these, and later operations make only the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter

_LIMIT = 4096
"""Most recordings of one function: a key may hold a constant of a kernel's data."""
_FIRST, _SECOND, _NEVER = 1, 2, 3
"""How often a key was seen before it is recorded, and that it cannot be recorded."""
_HANDLES = (
    interpreter.TensorHandle,
    interpreter.BlockPointerHandle,
    interpreter.TensorDescHandle,
)
"""What the builder takes and makes, and what differs from call to call."""
_TENSOR_FIELDS = {"handle", "type", "dtype", "numel", "shape"}
_CONSTANTS = frozenset(
    {
        "create_splat",
        "create_broadcast",
        "create_make_range",
        "create_int_cast",
        "create_si_to_fp",
        "create_ui_to_fp",
        "create_fp_ext",
        "create_fp_trunc",
    }
)
"""Calls that, with nothing but constants, are made once. `get_...` are others."""


class _NotRecorded(Exception):
    """An operation depends on something that the key or the recording lacks."""


class Recorder:
    """Passes calls on to the interpreter's builder, and notes them."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.builder, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            result = member(*args, **kwargs)
            self.calls.append((name, args, kwargs, result))
            return result

        return call


def replayed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `triton.language` as the interpreter calls it, which replays what
    it recorded.

    Args:
        operation: the function itself; it takes the interpreter's `_semantic`.
    """
    semantic = interpreter.interpreter_semantic
    builder = interpreter.interpreter_builder
    tensor = tl.tensor
    plans: dict[tuple[Any, ...], Any] = {}

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_semantic", None)
        # Debug mode checks values, and a recording is under way with another builder.
        if semantic.builder is not builder or builder.options.debug:
            return operation(*args, **kwargs, _semantic=semantic)
        try:
            key = tuple(
                [
                    (type(value) is tensor and value.type.number_for_replay)
                    or _mark(value)
                    for value in args
                ]
            )
            if kwargs:
                key += tuple([(name, _mark(kwargs[name])) for name in kwargs])
        except _NotRecorded:
            return operation(*args, **kwargs, _semantic=semantic)
        plan = plans.get(key)
        if plan is None or plan is _FIRST:
            if len(plans) >= _LIMIT:
                plans.clear()
            plans[key] = _SECOND if plan else _FIRST
        elif plan is _SECOND:
            result, plans[key] = _recorded(operation, args, kwargs)
            return result
        elif plan is not _NEVER:
            return plan(*args, **kwargs)
        return operation(*args, **kwargs, _semantic=semantic)

    return interpreted


def _mark(value: Any) -> Any:
    """What a recording knows of an argument: the type of a tensor, a constant's value.

    Raises:
        _NotRecorded: it is something else.
    """
    kind = type(value)
    if kind is tl.tensor:
        return _type_number(value.type)
    if kind is int or kind is bool or kind is str or value is None:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is tl.constexpr:
        return kind, _mark(value.value)
    if kind is tuple or kind is list:
        return kind, tuple([_mark(member) for member in value])
    if kind is slice:
        return kind, _mark(value.start), _mark(value.stop), _mark(value.step)
    return kind, _type_number(value)


_numbers: dict[tuple[Any, ...], int] = {}
tl.dtype.number_for_replay = 0


def _type_number(kind: Any) -> int:
    """A number for a type of Triton; equal types have the same one.

    Raises:
        _NotRecorded: it is no type of numbers, pointers or blocks of these.
    """
    number: int | None = getattr(kind, "number_for_replay", None)
    if not number:
        if type(kind) is tl.dtype:
            parts: tuple[Any, ...] = (kind.name,)
        elif type(kind) is tl.block_type:
            sizes = [getattr(size, "value", size) for size in kind.shape]
            parts = (_type_number(kind.element_ty), *sizes)
        elif type(kind) is tl.pointer_type:
            parts = ("*", _type_number(kind.element_ty), kind.address_space, kind.const)
        else:
            raise _NotRecorded
        number = kind.number_for_replay = _numbers.setdefault(parts, len(_numbers) + 1)
    return number


def _recorded(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The operation's result, and the function that replays it or `_NEVER`."""
    semantic = interpreter.interpreter_semantic
    args = tuple(_with_own_handle(value) for value in args)
    kwargs = {name: _with_own_handle(value) for name, value in kwargs.items()}
    recorder = Recorder(semantic.builder)
    semantic.builder = recorder
    try:
        result = operation(*args, **kwargs, _semantic=semantic)
    finally:
        semantic.builder = recorder.builder
    try:
        return result, _Program(args, kwargs).replay(recorder.calls, result)
    except _NotRecorded:
        return result, _NEVER


def _is_constant(value: Any) -> bool:
    """Whether an argument of the builder's calls is the same at each call."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    if isinstance(value, tl.constexpr):
        return _is_constant(value.value)
    numbers = value is None or isinstance(value, bool | int | float | str | tl.dtype)
    return numbers or type(value).__module__.startswith("triton._C.")


def _with_own_handle(value: Any) -> Any:
    """A tensor with a handle that no other argument has: `x * x` must not be recorded
    as the square of its second operand."""
    if type(value) is tl.tensor and type(value.handle) is interpreter.TensorHandle:
        handle = interpreter.TensorHandle(value.handle.data, value.handle.dtype)
        return tl.tensor(handle, value.type)
    return value


class _Program:
    """The recorded calls as a Python function of the operation's arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = {f"a{place}": value for place, value in enumerate(args)}
        self._inputs |= kwargs
        self._signature = ", ".join(self._inputs)
        self._handles = {
            id(value.handle): f"{name}.handle"
            for name, value in self._inputs.items()
            if type(value) is tl.tensor
        }
        self._values: dict[str, Any] = {
            "_builder": interpreter.interpreter_builder,
            "_new": object.__new__,
            "_tensor": tl.tensor,
            "_handle": interpreter.TensorHandle,
        }
        self._constant: set[int] = set()
        self._lines: list[str] = []

    def replay(self, calls: list[tuple[str, Any, Any, Any]], result: Any) -> Any:
        """The function.

        Raises:
            _NotRecorded: a call or the result has a tensor of unknown origin.
        """
        for number, (name, args, kwargs, returned) in enumerate(calls):
            self._call(f"_h{number}", name, args, kwargs, returned)
        self._return(result)
        text = "\n    ".join([f"def replay({self._signature}):", *self._lines])
        exec(text, self._values)
        return self._values["replay"]

    def _call(
        self, target: str, name: str, args: Any, kwargs: Any, returned: Any
    ) -> None:
        handles = [
            value for value in (*args, *kwargs.values()) if isinstance(value, _HANDLES)
        ]
        folds = name.startswith("get_") or name in _CONSTANTS
        if folds and all(id(handle) in self._constant for handle in handles):
            if isinstance(returned, _HANDLES):
                self._constant.add(id(returned))
                self._handles[id(returned)] = self._value(returned)
            return
        written = [self._text(value) for value in args]
        written += [f"{key}={self._text(value)}" for key, value in kwargs.items()]
        self._lines.append(f"{target} = _builder.{name}({', '.join(written)})")
        if isinstance(returned, _HANDLES):
            self._handles.setdefault(id(returned), target)
        elif returned is not None:
            raise _NotRecorded

    def _return(self, result: Any) -> None:
        for name, value in self._inputs.items():
            if result is value:
                self._lines.append(f"return {name}")
                return
        if result is None:
            self._lines.append("return None")
            return
        if type(result) is not tl.tensor or vars(result).keys() != _TENSOR_FIELDS:
            raise _NotRecorded
        handle = self._text(result.handle)
        if id(result.handle) in self._constant:
            # Who gets the tensor may set attributes of its handle.
            handle = f"_handle({handle}.data, {handle}.dtype)"
        self._lines += ["_t = _new(_tensor)", f"_t.handle = {handle}"]
        for field in ("type", "dtype", "numel", "shape"):
            self._lines.append(f"_t.{field} = {self._value(getattr(result, field))}")
        self._lines.append("return _t")

    def _text(self, value: Any) -> str:
        """The expression for an argument of a call."""
        if isinstance(value, _HANDLES):
            if id(value) not in self._handles:
                raise _NotRecorded
            return self._handles[id(value)]
        if not _is_constant(value):
            raise _NotRecorded
        return self._value(value)

    def _value(self, value: Any) -> str:
        """The name of a constant."""
        name = f"_{len(self._values)}"
        self._values[name] = value
        return name
