# SPDX-License-Identifier: Apache-2.0
"""Check that everything that ships was compiled: kernels, in each of their forms.

A wrapper chooses a kernel's configuration: compile-time parameters, sub-groups,
pipelining depth and registers. Triton then specializes it for the arguments: their
types, which ones are 1, and which ones are multiples of 16. To know which forms exist,
aot records (and does not compile) calls over ranges far wider than those it compiles.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.aot.calls.record import Launch


def launched(folder: Path) -> dict[str, Path]:
    """Name → file of every Triton kernel under `folder` that is launched.

    A function that another kernel calls is compiled as a part of that kernel.
    """
    kernels: dict[str, Path] = {}
    called: set[str] = set()
    for file in sorted(folder.glob("**/*.py")):
        for function in _jitted(ast.parse(file.read_text())):
            kernels[function.name] = file
            called.update(_calls(function))
    return {name: file for name, file in kernels.items() if name not in called}


def configuration(launch: Launch) -> str:
    """A launch's configuration in words."""
    constants = [
        f"{name}={value}"
        for name, value in launch.constexprs().items()
        if value is not None
    ]
    return (
        f"{launch.name} {' '.join(constants)} warps={launch.num_warps} "
        f"stages={launch.num_stages} grf={launch.grf}"
    )


def uncompiled(
    compiled: Iterable[Launch], every: Iterable[tuple[str, Launch]]
) -> dict[str, str]:
    """The configurations that `every` call needs and nothing compiled.

    Returns:
        Configuration → label of the first call that needs it.
    """
    known = {configuration(launch) for launch in compiled}
    missing: dict[str, str] = {}
    for label, launch in every:
        name = configuration(launch)
        if name not in known:
            missing.setdefault(name, label)
    return missing


def specialization(launch: Launch) -> frozenset[str]:
    """What Triton assumes of a launch's arguments, as conditions."""
    conditions: set[str] = set()
    for parameter in launch.function.params:
        if parameter.is_constexpr:
            continue
        name, place = parameter.name, (parameter.num,)
        if place in launch.constants:
            conditions.add(f"{name} == {launch.constants[place]}")
        else:
            conditions.add(f"{name}: {launch.signature[name]}")
        if launch.attributes.get(place):
            conditions.add(f"{name} % 16 == 0")
    return frozenset(conditions)


def unspecialized(
    compiled: Iterable[Launch], every: Iterable[tuple[str, Launch]]
) -> dict[str, str]:
    """The specializations that `every` call needs and nothing compiled.

    A configuration that nothing compiled is left out: `uncompiled` names it.

    Returns:
        Kernel, and how it differs from the compiled specialization that is most alike
        → label of the first call that needs it.
    """
    known: dict[str, set[frozenset[str]]] = defaultdict(set)
    for launch in compiled:
        known[configuration(launch)].add(specialization(launch))
    missing: dict[str, str] = {}
    for label, launch in every:
        forms, needed = known.get(configuration(launch)), specialization(launch)
        if forms and needed not in forms:
            # Sorted, so that of equally near ones the same is named each time.
            nearest = min(
                sorted(forms, key=sorted), key=lambda form: len(form ^ needed)
            )
            more, less = sorted(needed - nearest), sorted(nearest - needed)
            missing.setdefault(
                f"{configuration(launch)}: with {more or 'nothing'}"
                f" instead of {less or 'nothing'}",
                label,
            )
    return missing


def _jitted(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(decorator).partition("(")[0] == "triton.jit"
            for decorator in node.decorator_list
        ):
            yield node


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
