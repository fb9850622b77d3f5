# SPDX-License-Identifier: Apache-2.0
"""The whole way to machine code, and that nothing shipped is left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from aot.cases import cases
from aot.compile import compile_all
from aot.coverage import launched
from aot.ocloc import Ocloc, find
from aot.record import Launch, recording
from aot.run import gaps, record
from xpustack.core.cache import Cache


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


class Memory(dict[str, Any]):
    def results_get(self, key: str) -> dict[str, Any] | None:
        return self.get(key)

    def results_put(self, key: str, value: dict[str, Any]) -> None:
        self[key] = value


def test_a_small_product_fits_and_a_large_one_spills(ocloc: Ocloc) -> None:
    store = Memory()
    launches = [launch(32, 4), launch(64, 1)]
    small, large = compile_all(launches, ["pvc", "ptl"], ocloc, store)
    for device in ("pvc", "ptl"):
        assert small["devices"][device]["spill"] == 0
        assert small["devices"][device]["dpas"] > 0
        assert small["devices"][device]["simd"] == 16
    assert large["devices"]["pvc"]["spill"] > 0
    assert small["threads_per_warp"] == 16
    assert small["dots"][0]["shape"] == [32, 32]
    again = compile_all(launches, ["pvc", "ptl"], ocloc, store)
    assert [result["cached"] for result in again] == [True, True]


def test_a_compiler_failure_is_a_result(ocloc: Ocloc) -> None:
    bad = launch(32, 4)
    bad.constants[(3,)] = 24
    store = Memory()
    (result,) = compile_all([bad], ["pvc"], ocloc, store)
    assert "power of 2" in result["error"]
    assert not store


def test_nothing_that_ships_is_left_uncompiled() -> None:
    ours = record("ours", [(c.op, c.label, c.call) for c in cases()])
    assert {label for _, _, label, _ in ours} == {case.label for case in cases()}
    assert not gaps(ours)


def test_a_configuration_that_no_case_compiles_is_found() -> None:
    ours = record("ours", [(c.op, c.label, c.call) for c in cases()])
    kept = [
        recorded
        for recorded in ours
        if not recorded[3].constexprs().get("FUSE_POST")
        and recorded[3].constexprs().get("EXTRA") != 64
        and recorded[3].name != "norm_kernel"
    ]
    found = "\n".join(gaps(kept))
    assert "norm_kernel (" in found
    assert "project_kernel GATES=24" in found
    assert "_prefill_kernel EXTRA=64" in found
    assert "[prefill H1 H1 576 dims T1] needs it" in found


def test_a_kernel_that_nobody_launches_is_found(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(
        "@triton.jit\ndef part(x):\n    return x\n\n"
        "@triton.jit\ndef whole(x):\n    part(x)\n\n"
        "def plain(x):\n    whole[(1,)](x)\n"
    )
    assert list(launched(tmp_path)) == ["whole"]
