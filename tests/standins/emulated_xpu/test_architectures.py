# SPDX-License-Identifier: Apache-2.0
"""The emulated device answers as the one that a job states, and lacks what it lacks."""

import re
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from own_process import in_own_process
from test_schemas import wheel

from stack.base.releases import load
from stack.core.cache import Cache
from stack.core.project import Project
from standins.emulated_xpu import architectures, registry
from standins.emulated_xpu.wheel import pins
from standins.emulated_xpu.wheel.wheel_functions import functions_in, numbers_in

WHEELS = ("0.1.15.4", "0.1.16.2")
"""Versions that are published as wheels alone."""
NEWEST = "0.1.15.4"
TRUE = {
    "xe2": {"is_xe2_arch", "is_bmg", "is_bmg_g21"},
    "xe3": {"is_xe3_arch"},
    "pvc": {"is_xe2_arch", "is_pvc"},
    "pvc_vg": set[str](),
}
"""What each architecture affirms. A Max 1100 or 1550 (`pvc`) is an Xe2 to the pins."""


def on_device(
    call: Callable[[], Any], architecture: str | None, version: str = NEWEST
) -> Any:
    """What `call` returns in a process whose device is of that architecture."""
    return in_own_process(partial(_on_device, call, architecture, version))


def _on_device(call: Callable[[], Any], architecture: str | None, version: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(architectures.ARCHITECTURE, raising=False)
        if architecture is not None:
            patch.setenv(architectures.ARCHITECTURE, architecture)
        patch.setenv(pins.OVERRIDE, version)
        registry.define_ops(version)
        return call()


def answers() -> set[str]:
    """The queries that are affirmed."""
    names = [query["op"].partition("::")[2] for query in architectures.data()["query"]]
    return {name for name in names if getattr(torch.ops._xpu_C, name)(0)}


def score() -> torch.Size:
    """The shape of the scores of two rows over three keys."""
    shape: torch.Size = torch.ops._xpu_C.fp8_mqa_logits(
        torch.zeros(2, 1, 4).to(torch.float8_e4m3fn),
        torch.zeros(3, 4).to(torch.float8_e4m3fn),
        torch.ones(3),
        torch.ones(2, 1),
        torch.zeros(2, dtype=torch.int32),
        torch.full((2,), 3, dtype=torch.int32),
    ).shape
    return shape


def multiply() -> None:
    """Call the grouped product, whose device is looked at before its arguments."""
    names = torch.ops._xpu_C.cutlass_grouped_gemm_interface.default._schema.arguments
    given = {
        argument.name: torch.zeros(1, dtype=torch.float16)
        if "Tensor" in str(argument.type)
        else 1
        for argument in names
    }
    torch.ops._xpu_C.cutlass_grouped_gemm_interface(**given)


@pytest.mark.parametrize("architecture", architectures.data()["architecture"])
def test_a_device_says_what_it_is(architecture: str) -> None:
    assert on_device(answers, architecture) == TRUE[architecture]


def test_without_a_word_the_device_is_an_xe2() -> None:
    assert on_device(answers, None) == TRUE["xe2"]


def test_an_unknown_architecture_is_named_with_those_that_are_known() -> None:
    with pytest.raises(LookupError, match="ARCHITECTURE=xe9 is unknown; known: pvc, "):
        on_device(answers, "xe9")


@pytest.mark.parametrize("architecture", ["xe2", "pvc"])
def test_an_op_that_the_device_has_runs(architecture: str) -> None:
    assert on_device(score, architecture) == (2, 3)


@pytest.mark.parametrize("architecture", ["xe3", "pvc_vg"])
def test_an_op_that_the_device_lacks_ends_with_the_device_s_words(
    architecture: str,
) -> None:
    said = "Only XE2 mqa logits kernel is supported currently."
    with pytest.raises(RuntimeError, match=said):
        on_device(score, architecture)


@pytest.mark.parametrize(
    ("architecture", "version", "wrong"),
    [
        ("xe2", "0.1.8", False),
        ("pvc", "0.1.8", False),
        ("xe3", "0.1.8", True),
        ("xe3", "0.1.11.1", False),
        ("xe3", NEWEST, False),
        ("pvc", NEWEST, False),
        ("pvc_vg", NEWEST, True),
    ],
)
def test_no_numbers_are_made_up_where_the_device_s_are_wrong(
    architecture: str, version: str, wrong: bool
) -> None:
    with pytest.raises(NotImplementedError) as stopped:
        on_device(multiply, architecture, version)
    assert ("as if they were 16-bit ones" in str(stopped.value)) == wrong


@pytest.mark.parametrize("version", WHEELS)
def test_the_devices_are_those_of_the_wheel_s_machine_code(
    real_cache: Cache, version: str
) -> None:
    chips: dict[str, int] = architectures.data()["chip"]
    rows = [*architectures.data()["query"], *architectures.data()["op"]]
    libraries: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel(real_cache, version)) as archive:
        for library in ("_xpu_C", "_vllm_fa2_C"):
            path = f"vllm_xpu_kernels/{library}.abi3.so"
            libraries[library] = archive.read(path)
    codes = {library: list(functions_in(code)) for library, code in libraries.items()}
    compared = 0
    for row in rows:
        if "function" not in row:
            continue
        library = row.get("library", "_xpu_C")
        (code,) = (
            code
            for name, code in codes[library]
            if re.fullmatch(re.escape(row["function"]) + "(R.*|N.*)?", name)
        )
        assert numbers_in(code, chips) == set(row["chips"]), row["op"]
        assert row.get("says", "").encode() in libraries[library], row["op"]
        compared += 1
    assert compared == 10


def test_every_row_is_about_an_op_of_a_pin_and_says_where_it_was_read(
    real_project: Project,
) -> None:
    pinned = {release.xpu_kernels.version for release in load(real_project)}
    read = pinned - set(WHEELS)
    data = architectures.data()
    for row in [*data["query"], *data["op"]]:
        assert set(row["chips"]) <= data["chip"].keys(), row
        for version in row["source"]:
            assert version in read, row
        for version in read - row["source"].keys():
            others = [r for r in data["op"] if r is not row and r["op"] == row["op"]]
            assert row["op"] not in pins.schemas(version) or others, (version, row)
    assert set(data["architecture"].values()) <= data["chip"].keys()


def test_the_page_says_which_device_answers_no_prompt(real_project: Project) -> None:
    page = (real_project.root / "docs/deploying.md").read_text("utf-8")
    table = page.partition("## Devices\n")[2].partition("\n\n**")[0]
    rows = re.findall(r"(?m)^\|.*\(`(\w+)`\) \| yes \| (.*?) \|", table)
    assert len(rows) == 7
    scores = architectures.limit("_xpu_C::fp8_mqa_logits", NEWEST)
    assert scores is not None
    for code, ops in rows:
        chips = {c for c in architectures.data()["chip"] if c.partition("_")[0] == code}
        chips -= {"pvc_vg"}
        assert chips, code
        assert (ops == "**answers no prompt**") == chips.isdisjoint(scores.chips), code
        assert ops.startswith("all") == (chips <= scores.chips), code


def test_a_number_is_found_where_it_is_loaded_or_made_of_another() -> None:
    numbers = {"one": 0x500400400, "two": 0x500800000, "three": 0x30F000700}
    load_one = b"\x48\xb9" + numbers["one"].to_bytes(8, "little")
    assert numbers_in(load_one, numbers) == {"one"}
    added = b"\x81\xc1" + (0x3FFC00).to_bytes(4, "little")
    assert numbers_in(load_one + added, numbers) == {"one", "two"}
    assert not numbers_in(added, numbers)


def test_only_a_library_has_functions() -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        list(functions_in(b"#!/bin/sh"))
