# SPDX-License-Identifier: Apache-2.0
"""The emulated XPU replaces in torch what its list says, and lends no more than torch
has for an XPU.

Every case that provides something runs in a process of its own.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_process import in_own_process

from standins.emulated_xpu import device_api
from standins.emulated_xpu.device_api import (
    CACHES,
    GRANTS,
    MEMORY_FIGURES,
    PINNED_MEMORY,
    DeviceMemory,
    Grant,
)

ROOT = Path(__file__).parents[3]
LIST = (*GRANTS, *MEMORY_FIGURES, *PINNED_MEMORY, *CACHES)
OWNERS = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.accelerator": torch.accelerator,
    "torch.cuda": torch.cuda,
    "torch.xpu": torch.xpu,
}
WRITERS = {"device_api.py": {"remove_cuda"}, "collectives.py": {"provide"}}
"""Who may assign to torch without the list, by file."""


def contents() -> dict[str, Any]:
    return {
        f"{owner}.{name}": value
        for owner, holder in OWNERS.items()
        for name, value in vars(holder).items()
    }


def granted() -> set[str]:
    """The names of torch that another object has, after all is provided."""
    device_api.remove_cuda()
    before = contents()
    device_api.provide()
    device_api.provide_pinned_memory()
    device_api.provide_caches()
    return {
        name
        for name, value in contents().items()
        if name not in before or before[name] is not value
    }


def test_the_list_is_what_is_granted() -> None:
    assert in_own_process(granted) == {grant.name for grant in LIST}
    assert len({grant.name for grant in LIST}) == len(LIST)


@pytest.mark.parametrize("grant", LIST, ids=lambda grant: grant.name)
def test_a_grant_says_why(grant: Grant) -> None:
    for field in ("device", "reason"):
        with pytest.raises(ValueError, match="say what a device has"):
            replace(grant, **{field: " "})


def test_nothing_of_cuda_is_granted() -> None:
    with pytest.raises(ValueError, match="raises in a torch without CUDA"):
        Grant("torch.cuda.is_current_stream_capturing", "none", "a layer asks", None)


def attribute(name: str) -> Any:
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [
        (parameter.name, parameter.kind)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize(
    "grant",
    [
        grant
        for grant in LIST
        if grant.name.startswith(("torch.xpu", "torch.accelerator"))
    ],
    ids=lambda grant: grant.name,
)
def test_a_stand_in_takes_no_more_than_torchs_own(grant: Grant) -> None:
    """As an event does that takes `blocking`, which an XPU's refuses."""
    real = parameters(attribute(grant.name))
    ours = parameters(grant.value)
    assert ours == real[: len(ours)], (ours, real)


def declared(*names: str) -> set[str]:
    """What torch declares of its classes in C++, whichever build is installed."""
    stub = Path(torch.__file__).parent / "_C/__init__.pyi"
    found = set()
    for owner in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(owner, ast.ClassDef) and owner.name in names:
            for part in owner.body:
                if isinstance(part, ast.FunctionDef):
                    found.add(part.name)
                elif isinstance(part, ast.AnnAssign):
                    found.add(ast.unparse(part.target))
    return found


@pytest.mark.parametrize(
    ("stand_in", "names"),
    [
        (device_api.Event, ("Event",)),
        (device_api.XpuEvent, ("_XpuEventBase",)),
        (device_api.Stream, ("Stream", "_XpuStreamBase")),
    ],
)
def test_streams_and_events_have_no_more_than_torchs(
    stand_in: type, names: tuple[str, ...]
) -> None:
    written = {name for kind in stand_in.__mro__[:-1] for name in vars(kind)}
    described = {"__doc__", "__module__", "__dict__", "__weakref__", "__init__"}
    assert written - described <= declared(*names)


def test_only_what_is_made_for_the_device_lies_there() -> None:
    in_own_process(check_device_memory)


def check_device_memory() -> None:
    device_api.provide_pinned_memory()
    device_api.provide_caches()
    with DeviceMemory():
        cache, indices = torch.zeros(4, 8, dtype=torch.int8), torch.tensor([1])
        gone = torch.zeros(10 << 20, dtype=torch.int8)
        nothing = torch.zeros(0)
    assert cache.is_xpu and cache[1:].view(-1).is_xpu
    assert gone.is_xpu and not nothing.is_xpu
    del gone
    assert not torch.zeros(10 << 20, dtype=torch.int8).is_xpu, "an address came back"
    assert not indices.is_xpu and not cache.clone().is_xpu
    assert not torch.zeros(4).is_xpu


def test_a_product_has_the_dtypes_of_an_xpu() -> None:
    in_own_process(check_products)


def check_products() -> None:
    device_api.provide_matmul_with_dtype()
    half, single = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)
    assert torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
    for factor, dtype in ((single, torch.bfloat16), (half, torch.float16)):
        with pytest.raises(RuntimeError, match="on no XPU"):
            torch.mm(factor, factor, out_dtype=dtype)


def assignments(file: Path) -> Iterator[str]:
    """Where a file assigns to an attribute of torch, by function and line."""
    allowed = WRITERS.get(file.name, set())
    for owner in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(owner, ast.FunctionDef | ast.Module):
            continue
        if getattr(owner, "name", "") in allowed:
            continue
        for statement in own_statements(owner):
            for target in targets(statement):
                if ast.unparse(target).split(".")[0] == "torch":
                    yield f"{file.name}:{statement.lineno}: {ast.unparse(target)}"


def own_statements(owner: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, without those of functions inside."""
    for child in ast.iter_child_nodes(owner):
        if isinstance(child, ast.FunctionDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from own_statements(child)


def targets(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        yield from (t for t in statement.targets if isinstance(t, ast.Attribute))
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if ast.unparse(call.func) == "setattr":
            yield call.args[0]


@pytest.mark.parametrize(
    "file",
    [
        *sorted((ROOT / "standins/emulated_xpu").glob("*.py")),
        *sorted((ROOT / "standins/emulated_xpu/ops").glob("*.py")),
        ROOT / "proof/e2e/inside/engine_ops.py",
        ROOT / "proof/e2e/inside/recording.py",
    ],
    ids=lambda file: file.name,
)
def test_nobody_assigns_to_torch_beside_the_list(file: Path) -> None:
    assert not list(assignments(file))
