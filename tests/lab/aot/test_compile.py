# SPDX-License-Identifier: Apache-2.0
"""Compilation to machine code, and the check that it leaves out nothing shipped."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from lab.aot.calls.cases import cases
from lab.aot.calls.cases_indexer import ODD_WIDTH
from lab.aot.calls.record import Launch, LaunchRecord, record_cases, recording
from lab.aot.calls.upstream import newer_softmax
from lab.aot.compiler.compile import (
    SAME_CODE,
    compile_all,
    disassembled,
    for_devices,
    own_code,
    properties,
    to_spirv,
)
from lab.aot.compiler.ocloc import Ocloc, find
from lab.aot.coverage import launched
from lab.aot.run import gaps
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem


@triton.jit
def product(a_ptr, b_ptr, c_ptr, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)
    where = at[:, None] * SIDE + at[None, :]
    c = tl.dot(tl.load(a_ptr + where), tl.load(b_ptr + where))
    tl.store(c_ptr + where, c)


def launch(side: int, warps: int) -> Launch:
    a, b = (torch.empty(side, side, dtype=torch.bfloat16, device="meta"),) * 2
    c = torch.empty(side, side, device="meta")
    with recording() as launches:
        product[(1,)](a, b, c, SIDE=side, num_warps=warps, grf_mode="128")
    return launches[0]


@pytest.fixture(scope="module")
def ocloc() -> Ocloc:
    return find(Cache.default().root / "ocloc")


def test_a_small_product_fits_and_a_large_one_spills(
    ocloc: Ocloc, tmp_path: Path
) -> None:
    store = Cache(tmp_path)
    launches = [launch(32, 4), launch(64, 2)]
    small, large = compile_all(launches, ["pvc", "ptl"], ocloc, store)
    for device in ("pvc", "ptl"):
        assert small["devices"][device]["spill"] == 0
        assert small["devices"][device]["total"]["dpas"] > 0
        assert small["devices"][device]["simd"] == 16
    assert large["devices"]["pvc"]["spill"] > 0
    assert small["threads_per_warp"] == 16
    assert small["dots"][0]["shape"] == [32, 32]
    again = compile_all(launches, ["pvc", "ptl"], ocloc, store)
    assert [result["cached"] for result in again] == [True, True]
    assert [list(result["devices"]) for result in again] == [["pvc", "ptl"]] * 2


def test_a_compiler_failure_is_a_result(ocloc: Ocloc, tmp_path: Path) -> None:
    bad = launch(32, 4)
    bad.constants[(3,)] = 24
    (result,) = compile_all([bad], ["pvc"], ocloc, Cache(tmp_path))
    assert "power of 2" in result["error"]
    assert not list(tmp_path.rglob("*.json"))


class Full(Cache):
    """A cache on a disk that is full."""

    def results_put(self, key: str, value: Mapping[str, Any]) -> None:
        raise EnvironmentProblem("the disk is full")


def test_a_full_disk_is_no_fault_of_a_kernel(ocloc: Ocloc, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="full"):
        compile_all([launch(32, 4)], ["pvc"], ocloc, Full(tmp_path))


def test_launches_with_one_spirv_share_its_machine_code(
    ocloc: Ocloc, tmp_path: Path
) -> None:
    """Nothing is pipelined here. Devices and registers have code of their own."""
    first = launch(32, 4)
    launches = [first, replace(first, num_stages=3), replace(first, grf="256")]
    assert len({one.key() for one in launches}) == 3
    results = compile_all(launches, ["pvc", "ptl"], ocloc, Cache(tmp_path), jobs=1)
    assert results[0] == results[1] != results[2]
    assert [result["devices"]["ptl"]["grf"] for result in results] == [128, 128, 256]
    assert len(list(tmp_path.rglob("aot-code-*.json"))) == 2 * 2


def test_a_device_without_a_compilation_has_the_code_of_its_like() -> None:
    codes = {"pvc": {"spill": 0}, "bmg": {"spill": 64}}
    assert own_code(["pvc", "bmg", "lnl"]) == ["pvc", "bmg"]
    assert own_code(["lnl"]) == ["lnl"]
    whole = for_devices({"devices": codes}, ["pvc", "bmg", "lnl"])
    assert whole["devices"] == {**codes, "lnl": {"spill": 64}}
    error = {"error": "boom"}
    assert for_devices(error, ["pvc", "bmg", "lnl"]) == error


ALIKE = {
    "_decode_kernel": "H64 ratio 4 T1",
    "_merge_kernel": "H64 ratio 4 T1",
    "_dim_lanes_prefill_kernel": "H8",
    "paged_mqa_logits_kernel": "MXFP4",
}
"""Kernel → part of the label of the launch of it that is compared."""


@pytest.mark.parametrize("kernel", ALIKE)
@pytest.mark.parametrize("device", SAME_CODE)
def test_one_instruction_set_has_one_machine_code(
    ours: list[LaunchRecord], ocloc: Ocloc, tmp_path: Path, kernel: str, device: str
) -> None:
    """Everything that `ocloc disasm` writes but the note that names the device."""
    like = SAME_CODE[device]
    assert properties(ocloc, device) == properties(ocloc, like)
    chosen = next(
        record.launch
        for record in ours
        if record.launch.name == kernel and ALIKE[kernel] in record.label
    )
    with newer_softmax():
        module = to_spirv(chosen, properties(ocloc, like))
    codes = []
    for name in (device, like):
        (tmp_path / name).mkdir()
        folder = disassembled(module, name, chosen.grf, ocloc, tmp_path / name)
        codes.append({file.name: file.read_bytes() for file in folder.iterdir()})
    note = ".note.intelgt.compat"
    assert codes[0].pop(note) != codes[1].pop(note)
    assert f".text.{kernel}.asm" in codes[0]
    assert codes[0] == codes[1]


@pytest.fixture(scope="module")
def ours() -> list[LaunchRecord]:
    return record_cases("ours", cases())


def test_nothing_that_ships_is_left_uncompiled(ours: list[LaunchRecord]) -> None:
    assert {record.label for record in ours} == {case.label for case in cases()}
    assert not gaps(ours)


def test_a_configuration_that_no_case_compiles_is_found(
    ours: list[LaunchRecord],
) -> None:
    kept = [
        record
        for record in ours
        if not record.launch.constexprs().get("FUSE_POST")
        and record.launch.constexprs().get("HAS_LENS") is not False
        and record.launch.name != "norm_kernel"
    ]
    text = "\n".join(gaps(kept))
    assert "norm_kernel (" in text
    assert "project_kernel GATES=24" in text
    assert "_prefill_kernel HAS_LENS=False" in text
    assert "[prefill H64 ratio 4 without sink and lengths] needs it" in text


def test_a_specialization_that_no_case_compiles_is_found(
    ours: list[LaunchRecord],
) -> None:
    kept = [record for record in ours if f"{ODD_WIDTH} keys" not in record.label]
    (gap,) = gaps(kept)
    assert gap.startswith("_combine_kernel HAS_IMAGES=False")
    assert "with nothing instead of ['topk % 16 == 0']: [" in gap
    few = [record for record in kept if "T128" not in record.label]
    text = "\n".join(gaps(few))
    assert "_merge_kernel HAS_SINK=True HEADS_PER_GROUP=0 BLOCK_S=2" in text
    assert "with nothing instead of ['num_heads % 16 == 0']: [decode H" in text


def test_a_kernel_that_nobody_launches_is_found(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(
        "@triton.jit\ndef part(x):\n    return x\n\n"
        "@triton.jit\ndef whole(x):\n    part(x)\n\n"
        "def plain(x):\n    whole[(1,)](x)\n"
    )
    assert list(launched(tmp_path)) == ["whole"]
