# SPDX-License-Identifier: Apache-2.0
"""The recorder sees what a wrapper launches, down to divisibility."""

import importlib.util
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from lab.aot.calls.record import Launch, recording
from lab.aot.coverage import specialization, unspecialized

WIDTH = tl.constexpr(64)


@triton.jit
def add(x_ptr, y_ptr, size, scale, one, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    tl.store(y_ptr + offsets * one, x * scale + WIDTH, mask=mask)


def launch(offset: int = 0, size: int = 100, **options: object) -> Launch:
    x = torch.empty(256, dtype=torch.bfloat16, device="meta")[offset:]
    y = torch.empty(256, dtype=torch.float32, device="meta")
    with recording() as launches:
        add[(triton.cdiv(size, 32), 2)](x, y, size, 0.5, 1, BLOCK=32, **options)
    return launches[0]


def test_signature_and_constants() -> None:
    recorded = launch(num_warps=8, grf_mode="256")
    assert recorded.name == "add"
    assert list(recorded.signature.values()) == [
        "*bf16",
        "*fp32",
        "i32",
        "fp32",
        "constexpr",
        "constexpr",
    ]
    assert recorded.constants == {(4,): 1, (5,): 32}
    assert recorded.constexprs() == {"BLOCK": 32}
    assert (recorded.num_warps, recorded.grf, recorded.grid) == (8, "256", (4, 2))


def test_divisibility_follows_the_offset_of_a_view() -> None:
    sixteen = [["tt.divisibility", 16]]
    assert launch().attributes[(0,)] == sixteen
    assert launch(offset=8).attributes[(0,)] == sixteen
    assert launch(offset=1).attributes[(0,)] == []
    assert launch(size=96).attributes[(2,)] == sixteen
    assert launch(size=100).attributes[(2,)] == []


def test_specializations_are_compared() -> None:
    needed = [("odd", launch()), ("even", launch(size=96)), ("view", launch(offset=1))]
    assert unspecialized([call for _, call in needed], needed) == {}
    odd = "add BLOCK=32 warps=4 stages=2 grf=:"
    assert unspecialized([launch()], needed) == {
        f"{odd} with ['size % 16 == 0'] instead of nothing": "even",
        f"{odd} with nothing instead of ['x_ptr % 16 == 0']": "view",
    }
    one = launch(size=1)
    assert "size == 1" in specialization(one)
    assert unspecialized([launch()], [("one", one)]) == {
        f"{odd} with ['size == 1'] instead of ['size: i32']": "one"
    }
    # Another configuration: `uncompiled` names it.
    assert unspecialized([launch(num_warps=8)], needed) == {}


def test_key_tells_configurations_apart() -> None:
    keys = {
        launch().key(),
        launch(offset=1).key(),
        launch(num_warps=8).key(),
        launch(grf_mode="256").key(),
    }
    assert len(keys) == 4
    assert launch().key() == launch().key()


def test_key_sees_module_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launch().key()
    monkeypatch.setitem(globals(), "WIDTH", tl.constexpr(128))
    assert launch().key() != before


HELPER = """\
import triton
import triton.language as tl


@triton.jit
def twice(x):
    return x * 2
"""
KERNEL = """

@triton.jit
def whole(x_ptr, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)
    tl.store(x_ptr + at, twice(tl.load(x_ptr + at)))
"""


def key_of(folder: Path, text: str) -> str:
    """The key of one launch of `whole` from a module with this text."""
    file = folder / f"m{abs(hash(text))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("module", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with recording() as launches:
        module.whole[(1,)](torch.empty(32, device="meta"), SIDE=32)
    return launches[0].key()


def test_key_does_not_depend_on_lines(tmp_path: Path) -> None:
    key = key_of(tmp_path, HELPER + KERNEL)
    assert key_of(tmp_path, "# moved\n\n" + HELPER + "\n\n\n" + KERNEL) == key
    assert (
        key_of(tmp_path, HELPER + KERNEL.replace("    at", "    # at\n    at")) == key
    )


def test_key_sees_the_text_of_a_helper(tmp_path: Path) -> None:
    key = key_of(tmp_path, HELPER + KERNEL)
    assert key_of(tmp_path, HELPER.replace("* 2", "* 3") + KERNEL) != key
    assert key_of(tmp_path, HELPER + KERNEL.replace("(0, SIDE)", "(1, SIDE)")) != key


def test_unknown_launch_option_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"unknown options.*num_wraps"):
        launch(num_wraps=4)


def test_launching_is_restored_afterwards() -> None:
    original = triton.JITFunction.run
    with recording():
        assert triton.JITFunction.run is not original
    assert triton.JITFunction.run is original
