# SPDX-License-Identifier: Apache-2.0
"""Each rule of the report turns a row red, and a sound row has no fault."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kernels.xpu_dsv4
from lab.aot.calls.record import Launch
from lab.aot.compiler.compile import dots
from lab.aot.compiler.loops import Work, work
from lab.aot.compiler.machine import Machine, read
from lab.aot.coverage import launched
from lab.aot.report import OURS, TURN, Row, csv_rows, rates, summary

CODE = {
    **asdict(
        Machine(
            spill=0,
            private=0,
            grf=256,
            simd=16,
            barriers=1,
            total=Work(instructions=99, dpas=8, sends=9),
            loop=Work(instructions=50),
        )
    ),
    "slm": 1024,
}
PV = {
    "shape": [16, 512],
    "warps": [1, 16],
    "of_probabilities": True,
    "transposed": False,
}
VP = {**PV, "shape": [64, 64], "warps": [4, 4], "transposed": True}
QK = {"shape": [16, 16], "warps": [16, 1], "of_probabilities": False}


def row(code: dict[str, Any] | None = None, **changed: Any) -> Row:
    launch = SimpleNamespace(num_warps=16, num_stages=1, grf="256")
    result = {
        "dots": [QK, PV],
        "threads_per_warp": 16,
        "devices": {"pvc": CODE, "bmg": {**CODE, **(code or {})}},
        **changed,
    }
    return Row("ours", "op", "kernel", ("call",), cast(Launch, launch), result)


def test_a_sound_row_has_no_fault() -> None:
    assert row().faults() == row(dots=[QK, VP]).faults() == []


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (row({"spill": 64}), "bmg: 64 bytes of spill per thread"),
        (
            row({"total": asdict(Work(instructions=91))}),
            "bmg: a matrix product without dpas",
        ),
        (row({"slm": 131073}), "bmg: 131073 bytes of SLM per work-group"),
        (row(threads_per_warp=128), "more than 1024 work-items per work-group"),
        (
            row(dots=[QK, {**PV, "warps": [16, 1]}]),
            "PV product [16, 512] has sub-groups [16, 1]",
        ),
        (
            row(dots=[QK, {**PV, "warps": [4, 4]}]),
            "PV product [16, 512] has sub-groups [4, 4]",
        ),
        (
            row(dots=[QK, {**PV, "shape": [128, 512], "warps": [16, 1]}]),
            "PV product [128, 512] has sub-groups [16, 1]",
        ),
        (
            row(dots=[QK, {**VP, "warps": [1, 16]}]),
            "PV product [64, 64] has sub-groups [1, 16]",
        ),
        (row(dots=[{**QK, "warps": None}]), "[16, 16] is not on the matrix unit"),
        (row(error="boom"), "does not compile: boom"),
    ],
    ids=[
        "spill",
        "dpas",
        "slm",
        "items",
        "rows",
        "repeated",
        "no columns",
        "transposed",
        "no dpas",
        "error",
    ],
)
def test_each_rule(bad: Row, fault: str) -> None:
    assert len(bad.faults()) == 1
    assert fault in bad.faults()[0]


TTGIR = """\
#mma = #triton_intel_gpu.dpas<{repeatCount = 8, warpsPerCTA = [4, 1], A = [8, 16]}>
#m1 = #triton_intel_gpu.dpas<{repeatCount = 8, warpsPerCTA = [1, 4], A = [8, 16]}>
    %0 = scf.if %c -> (tensor<16x16xf32>) {
      %1 = math.exp2 %a : tensor<16x16xf32, #mma>
    } else {
      %1 = arith.addf %a, %b : tensor<16x16xf32, #mma>
      %2 = tt.dot %1, %k, %z, inputPrecision = tf32 : A * B -> tensor<16x16xf32, #mma>
    }
    scf.for %i = %x to %y {
      %1 = arith.mulf %2, %s : tensor<16x16xf32, #mma>
      %3 = math.exp2 %1 : tensor<16x16xf32, #mma>
      %4 = arith.truncf %3 : tensor<16x16xf32, #mma> to tensor<16x16xbf16, #mma>
      %5 = tt.dot %4, %v, %acc : A * B -> tensor<16x512xf32, #m1>
      %6 = tt.trans %4 : tensor<16x16xbf16, #mma> -> tensor<16x16xbf16, #m1>
      %7 = tt.dot %v, %6, %acc : A * B -> tensor<64x16xf32, #m1>
    }
"""


def test_products_of_probabilities_are_told_apart() -> None:
    assert dots(TTGIR) == [
        {"shape": shape, "warps": warps, "of_probabilities": p, "transposed": right}
        for shape, warps, p, right in (
            ([16, 16], [4, 1], False, False),
            ([16, 512], [1, 4], True, False),
            ([64, 16], [1, 4], True, True),
        )
    ]


def test_machine_code_is_read(tmp_path: Path) -> None:
    (tmp_path / ".ze_info").write_text(
        "kernels:\n"
        "  - name: 'other'\n    execution_env:\n      grf_count: 128\n"
        "      simd_size: 32\n      spill_size: 7\n"
        "  - name: 'mine'\n    execution_env:\n      barrier_count: 1\n"
        "      grf_count: 256\n      simd_size: 16\n      spill_size: 640\n"
        "version: '1.50'\n"
    )
    (tmp_path / ".text.mine.asm").write_text(
        "L0:\n"
        "(W)     mov (16|M0)   r1.0<1>:ud  0x0:ud\n"
        "        send.ugm (16|M0)  r2 r3 null:0 0x0 0x0\n"
        "(f0.0)  dpas.8x8 (16|M0)  r4:f null:f r5:bf r6:bf\n"
        "L64:\n"
        "(W)     math.inv (8|M0)  r2.0<1>:f     r2.10<0;1,0>:f\n"
        "        add (16|M0)  r3.0<1>:q     r3.0<1;1,0>:q     r2.1<0;1,0>:q\n"
        "        sync.bar  null\n"
        "        send.slm (16|M0)  r2 r3 // wr:1+0, rd:1; load.slm.d16u32.a32\n"
        "        send.slm (16|M0)  r2 r3 r4:4 // wr:1+4, rd:0; store.slm.d32x4.a32\n"
        "        send.ugm (1|M0)  r2 r3 // wr:1+0, rd:8; load_block2d.ugm.d16.a64\n"
        "        dpas.8x8 (16|M0)  r4:f null:f r5:bf r6:bf\n"
        "(W&f0.0) jmpi                                 L96\n"
        "(W)     jmpi                                 L64\n"
        "L96:\n"
    )
    machine = read(tmp_path, "mine")
    assert (machine.spill, machine.grf, machine.simd) == (640, 256, 16)
    assert machine.barriers == 1
    assert (machine.total.dpas, machine.total.sends) == (2, 4)
    assert machine.total.instructions == 12
    assert machine.loop == Work(
        instructions=9,
        cycles=10,
        math=2,
        dpas=1,
        sends=3,
        narrow_loads=1,
        slm=5 * 64,
        memory=8 * 64,
        barriers=1,
    )
    assert machine.loop.rare == 0
    with pytest.raises(ValueError, match="names no kernel nobody"):
        read(tmp_path, "nobody")


LOOP = """\
L0:
        add (16|M0)  r3.0<1>:f     r3.0<1;1,0>:f     r2.1<0;1,0>:f
(W&f1.1) jmpi                                L2
        mov (16|M0)  r3.0<1>:f     r3.0<1;1,0>:f
(W)     jmpi                                 L3
L2:
        mul (16|M0)  r4.0<1>:f     r4.0<1;1,0>:f     r2.1<0;1,0>:f
        {arm}
        mul (16|M0)  r5.0<1>:f     r5.0<1;1,0>:f     r2.1<0;1,0>:f
L3:
        {end}
(W&f0.0) jmpi                                L0
L4:
"""
DPAS = "dpas.8x8 (16|M0)  r4:f null:f r5:bf r6:bf"


@pytest.mark.parametrize(
    ("arm", "rare"),
    [
        ("mul (16|M0)  r6.0<1>:f     r6.0<1;1,0>:f     r2.1<0;1,0>:f", 3),
        ("send.slm (16|M0)  r2 r3 // wr:1+0, rd:1; load.slm.d32.a32", 3),
        ("send.ugm (16|M0)  r2 r3 // wr:1+0, rd:1; load.ugm.d32.a64", 0),
        (DPAS, 0),
    ],
)
def test_an_arm_that_only_computes_is_rare(arm: str, rare: int) -> None:
    total, (loop,), _ = work(LOOP.format(arm=arm, end=DPAS))
    assert (loop.rare, loop.instructions) == (rare, 9 - rare)
    assert (total.rare, total.instructions) == (0, 9)


def test_no_arm_is_rare_where_nothing_multiplies() -> None:
    add = "add (16|M0)  r3.0<1>:f     r3.0<1;1,0>:f     r2.1<0;1,0>:f"
    _, (loop,), _ = work(LOOP.format(arm=add, end=add))
    assert (loop.rare, loop.instructions) == (0, 9)


NESTED = """L0:
        add (16|M0)  r3.0<1>:f     r3.0<1;1,0>:f     r2.1<0;1,0>:f
L1:
        mul (16|M0)  r6.0<1>:f     r6.0<1;1,0>:f     r2.1<0;1,0>:f
        dpas.8x8 (16|M0)  r4:f null:f r5:bf r6:bf
(W&f0.0) jmpi                                L1
        sync.bar  null
{outside}
(W&f0.0) jmpi                                L0
"""


def test_a_loop_that_only_repeats_another_is_none_of_its_own() -> None:
    """Prefill reads all keys again where a score is far from 0."""
    add = "add (16|M0)  r3.0<1>:f     r3.0<1;1,0>:f     r2.1<0;1,0>:f"
    total, (loop,), around = work(NESTED.format(outside=add))
    assert (total.instructions, loop.instructions, loop.dpas) == (7, 3, 1)
    assert (around.instructions, around.dpas, around.barriers) == (4, 0, 1)
    # An outer loop with products of its own is the one that counts.
    _, (outer, inner), around = work(NESTED.format(outside=DPAS))
    assert (outer.dpas, inner.dpas, around) == (2, 1, Work())


def test_rates_know_kernels_that_exist() -> None:
    shipped = launched(Path(kernels.xpu_dsv4.__path__[0]))
    assert set(TURN) - set(shipped) == {"_bf16_mla_sparse_kernel"}


def test_rates_are_per_key_and_empty_where_nothing_is_known() -> None:
    loop = Work(
        instructions=64, dpas=8, sends=4, narrow_loads=2, slm=96, memory=32, barriers=1
    )
    decode = replace(row({"loop": asdict(loop)}), kernel="_decode_kernel")
    known = {"num_warps": 16, "constexprs": lambda: {"BLOCK_N": 16}}
    decode = replace(decode, launch=cast(Launch, SimpleNamespace(**known)))
    assert rates(decode, "bmg") == {
        "instructions a key": "4",
        "dpas a key": "0.5",
        "narrow a key": "0.125",
        "bytes a message": "32",
        "work-groups": "2",
    }
    other = row()
    other.result["devices"]["xyz"] = CODE
    assert not any(rates(other, "xyz").values())


def test_the_rows_are_one_for_each_device_and_the_summary_takes_the_worst() -> None:
    theirs = replace(row({"spill": 640}), origin="v0.33.0")
    broken = row(error="no\nmemory", devices={})
    broken = replace(broken, origin="v0.33.0", op="other")
    rows = [row(), theirs, broken]
    data = csv_rows(rows)
    assert [each["by"] for each in data] == ["Upstream v0.33.0"] * 3 + [OURS] * 2
    assert [each.get("device") for each in data] == ["pvc", "bmg", None, "pvc", "bmg"]
    assert (data[1]["spill"], data[1]["loop"], data[1]["dpas"]) == (640, 50, 8)
    assert data[2]["products"] == "does not compile: memory"
    text = summary(rows, "compilers", ["pvc", "bmg"])
    assert "\n| op | 640 | 50 | 0 | 50 |" in text
