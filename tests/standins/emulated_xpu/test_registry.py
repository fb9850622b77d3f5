# SPDX-License-Identifier: Apache-2.0
"""The stand-ins have the schemas of the vllm-xpu-kernels version they stand for.

An op that is defined with torch cannot be undefined. So every case runs in a process of
its own: a fork of this one, which has imported torch and defined no op.
"""

import os
from typing import Any

import pytest
import torch
from own_process import in_own_process

from standins.emulated_xpu import registry
from standins.emulated_xpu.wheel import implementations, pins

VERSIONS = sorted(path.stem for path in pins.SCHEMAS.glob("*.txt"))
UNIMPLEMENTED = "_C::gelu_quick"


def defined_schemas(version: str) -> dict[str, str]:
    """Canonical schemas by qualified name, as torch holds them."""
    registry.define_ops(version)
    by_name = {}
    for name in pins.schemas(version):
        operator, _, overload = name.partition(".")
        by_name[name] = str(torch._C._get_schema(operator, overload))
    return by_name


def call(version: str, *args: Any) -> Any:
    registry.define_ops(version)
    return torch.ops._C.gelu_quick(*args)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_op_is_defined_as_that_version_declares_it(version: str) -> None:
    actual = in_own_process(defined_schemas, version)
    expected = {
        name: str(torch._C.parse_schema(f"{name.partition('::')[0]}::{schema}"))
        for name, schema in pins.schemas(version).items()
    }
    assert len(expected) > 50
    assert actual == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_an_op_without_implementation_raises_with_its_name(version: str) -> None:
    assert UNIMPLEMENTED in pins.schemas(version)
    x = torch.zeros(2)
    with pytest.raises(NotImplementedError, match=UNIMPLEMENTED):
        in_own_process(call, version, x, x)


@pytest.mark.parametrize(
    "args",
    [
        (),
        (torch.zeros(1),),
        (torch.zeros(1), "much"),
        (torch.zeros(1), torch.zeros(1), 1),
        (None, torch.zeros(1)),
    ],
)
def test_a_call_that_does_not_fit_the_schema_fails(args: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, RuntimeError), match="gelu_quick") as caught:
        in_own_process(call, VERSIONS[0], *args)
    assert not isinstance(caught.value, NotImplementedError)


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(LookupError, match=r"9\.9\.9; known: .*0\.1\.15\.4"):
        in_own_process(registry.define_ops, "9.9.9")


def version_after_override(version: str) -> tuple[str, int]:
    os.environ[pins.OVERRIDE] = version
    registry.define_ops()
    return pins.kernels_version(), len(registry._defined)


def test_the_override_names_the_version() -> None:
    assert in_own_process(version_after_override, "0.1.8") == ("0.1.8", 1)


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ("vllm_xpu_kernels==0.1.9", "0.1.9"),
        ("vllm-xpu-kernels == 0.1.15.4", "0.1.15.4"),
        ("vllm_xpu_kernels @ https://h/vllm_xpu_kernels-0.1.7-cp38-abi3.whl", "0.1.7"),
    ],
)
def test_the_installed_wheel_names_the_version(
    requirement: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(pins.OVERRIDE, raising=False)
    requirements = ["torch==2.11.0", requirement]
    monkeypatch.setattr(pins.metadata, "requires", lambda package: requirements)
    assert pins.kernels_version() == version


def test_a_wheel_for_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pins.OVERRIDE, raising=False)
    monkeypatch.setattr(pins.metadata, "requires", lambda package: ["torch==2.11.0"])
    monkeypatch.setattr(pins.metadata, "version", lambda package: "0.23.0")
    with pytest.raises(LookupError, match=r"0\.23\.0 names no version"):
        pins.kernels_version()


def define_twice(second: str) -> None:
    registry.define_ops("0.1.8")
    registry.define_ops(second)


def test_defining_the_same_version_again_changes_nothing() -> None:
    in_own_process(define_twice, "0.1.8")


def test_two_versions_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"0\.1\.8 are defined already, 0\.1\.11\.1"):
        in_own_process(define_twice, "0.1.11.1")


def result_and_calls() -> tuple[list[float], dict[str, int]]:
    @implementations.implements(UNIMPLEMENTED)
    def write(out: torch.Tensor, input: torch.Tensor) -> None:
        out.copy_(input + 0.5)

    registry.define_ops("0.1.8")
    out = torch.zeros(2)
    for _ in range(3):
        torch.ops._C.gelu_quick(out, torch.ones(2))
    return out.tolist(), dict(registry.calls)


def test_an_implementation_runs_and_is_counted() -> None:
    assert in_own_process(result_and_calls) == ([1.5, 1.5], {UNIMPLEMENTED: 3})


def implement_twice() -> None:
    for _ in range(2):
        implementations.implements(UNIMPLEMENTED)(print)


def test_an_op_has_one_implementation() -> None:
    with pytest.raises(ValueError, match=f"{UNIMPLEMENTED} is implemented twice"):
        in_own_process(implement_twice)
