# SPDX-License-Identifier: Apache-2.0
"""Record what a kernel wrapper launches, instead of launching it.

The shipped wrapper runs unchanged on tensors of the `meta` device and chooses its own
configuration; only `JITFunction.run` is replaced. So aot compiles exactly what the
wrapper launches.
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lab.aot.calls import source
from lab.aot.calls.shapes import Case


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        function: the Triton function.
        signature: Triton type of every parameter, `constexpr` for compile-time ones.
        constants: position of every compile-time parameter → its value.
        attributes: position → attributes such as divisibility by 16.
        num_warps: sub-groups per work-group.
        num_stages: pipelining depth.
        grf: registers per hardware thread: "128", "256", "auto" or "" (not chosen).
        grid: number of work-groups along each axis.
    """

    function: JITFunction
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    num_stages: int
    grf: str
    grid: tuple[int, ...] = field(compare=False)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.function.fn.__name__)

    def constexprs(self) -> dict[str, Any]:
        """Compile-time parameters of the kernel by name, without specialized ones."""
        return {
            parameter.name: self.constants.get((parameter.num,))
            for parameter in self.function.params
            if parameter.is_constexpr
        }

    def key(self) -> str:
        """Hash of everything of this launch that decides the machine code."""
        parts = (
            source.parts(self.function),
            sorted(self.signature.items()),
            sorted((k, str(v)) for k, v in self.constants.items()),
            sorted(self.attributes.items()),
            self.num_warps,
            self.num_stages,
            self.grf,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class LaunchRecord:
    """A launch and the call that it comes from.

    Attributes:
        origin: "ours", or the release that the kernel comes from.
        op: group of the call.
        label: name of the call in its group.
    """

    origin: str
    op: str
    label: str
    launch: Launch


class _Specialization(BaseBackend):
    """Triton's own rule for divisibility, applied to the offset of meta tensors."""

    @staticmethod
    def get_arg_specialization(arg: Any, ty: str, **kwargs: Any) -> str:
        if not kwargs.get("align", False):
            return ""
        if ty == "int":
            return "D" if arg % 16 == 0 else ""
        if ty == "tensor" and isinstance(arg, torch.Tensor):
            return "D" if arg.storage_offset() * arg.element_size() % 16 == 0 else ""
        return ""


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches into the list that the context yields, in order."""
    launches: list[Launch] = []
    original = JITFunction.run
    binders: dict[int, Any] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kw: Any) -> None:
        binder = binders.get(id(self))
        if binder is None:
            binder = binders[id(self)] = create_function_from_signature(
                self.signature, self.params, _Specialization
            )
        bound, specialization, options = binder(*args, **kw)
        launches.append(_launch(self, bound, specialization, options, grid))

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def record_cases(origin: str, cases: Iterable[Case]) -> list[LaunchRecord]:
    """Run the calls of `cases` under the recorder: every launch, in order."""
    records: list[LaunchRecord] = []
    with recording() as launches:
        for case in cases:
            count = len(launches)
            case.call()
            records += [
                LaunchRecord(origin, case.op, case.label, launch)
                for launch in launches[count:]
            ]
    return records


KNOWN_OPTIONS = frozenset(
    ("num_warps", "num_stages", "num_ctas", "grf_mode", "debug", "launch_pdl")
)
"""Launch options that an XPU launch may carry; `launch_pdl` means nothing there."""


def _launch(
    function: JITFunction,
    bound: dict[str, Any],
    specialization: list[tuple[Any, Any]],
    options: dict[str, Any],
    grid: Any,
) -> Launch:
    unknown = sorted(set(options) - KNOWN_OPTIONS)
    if unknown:
        name, path = function.fn.__name__, inspect.getsourcefile(function.fn)
        raise KeyError(f"{name} ({path}) is launched with unknown options {unknown}")
    names = [parameter.name for parameter in function.params]
    values = list(bound.values())
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (kind, extra) in enumerate(specialization):
        if kind == "constexpr":
            constants[(index,)] = values[index]
        elif isinstance(extra, str):
            attributes[(index,)] = BaseBackend.parse_attr(extra)
    size = grid(bound) if callable(grid) else grid
    return Launch(
        function=function,
        signature={n: kind for n, (kind, _) in zip(names, specialization, strict=True)},
        constants=constants,
        attributes=attributes,
        num_warps=options.get("num_warps", 4),
        num_stages=options.get("num_stages", 2),
        grf=str(options.get("grf_mode", "")),
        grid=tuple(int(n) for n in size),
    )
