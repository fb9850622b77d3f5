# SPDX-License-Identifier: Apache-2.0
"""The interpreter repair, proven exhaustively; and that the fault it repairs exists."""

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import Forks

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import math
import torch, triton, triton.language as tl

@triton.jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, v.to(out.dtype.element_ty), mask=i < n)

@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    av = tl.load(a + m[:, None] * K + k)
    bv = tl.load(b + k[:, None] * N + n)
    tl.store(out + m[:, None] * N + n, tl.dot(av, bv))

@triton.jit
def arith_kernel(a, b, total, product, less, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(total + i, x + y)
    tl.store(product + i, -x * y)
    tl.store(less + i, (x < y).to(tl.int32))

@triton.jit
def flag_kernel(out, flag):
    if flag:
        tl.store(out, 1)
    else:
        tl.store(out, 2)

@triton.jit
def bounds_kernel(a, b, least, most, N: tl.constexpr, NAN: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(least + i, tl.minimum(x, y, propagate_nan=NAN))
    tl.store(most + i, tl.maximum(x, y, propagate_nan=NAN))

def bounds(a, b, nan=tl.PropagateNan.NONE):
    least, most = torch.empty_like(a), torch.empty_like(a)
    bounds_kernel[(1,)](a, b, least, most, N=a.numel(), NAN=nan)
    return least, most

def cast(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out

def bits(t):
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])

def same(got, want):
    nan = torch.isnan(want.float())
    assert torch.equal(torch.isnan(got.float()), nan)
    assert torch.equal(bits(got)[~nan], bits(want)[~nan])

def saturated(x, dtype):
    x = x.float()
    return (x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x).to(dtype)

def codes(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    every = torch.arange(256 ** size, dtype=torch.int32)
    return every.to({1: torch.uint8, 2: torch.uint16}[size]).view(dtype)

def hard_floats():
    g = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1 << 16,), generator=g)
    anything = patterns.to(torch.int32).view(torch.float32)
    usual = torch.randn(1 << 14, generator=g) * 100
    near = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        grid = codes(dtype).float()
        grid = grid[grid.isfinite()].unique()
        middle = (grid[1:] + grid[:-1]) / 2
        for base in (grid, middle):
            up = torch.nextafter(base, torch.tensor(math.inf))
            down = torch.nextafter(base, torch.tensor(-math.inf))
            near += [base, up, down]
    coarse = (torch.randint(0, 1 << 16, (1 << 14,), generator=g) << 16) | 0x8000
    ties = coarse.to(torch.int64).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 31.86, 448.0,
        463.9, 464.0, 465.0, 480.0, 1e4, -1e4, 57344.0, 61439.0, 61440.0, 65519.0,
        65520.0, 3.3895e38, 3.4028e38, 1e-45, 1e-40, 2**-149, 2**-126, 2**-133])
    return torch.cat([anything, usual, *near, ties, special])
"""


Interpret = Callable[..., None]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Triton as it is: a program that wants it repaired does that in its fork."""
    path = os.environ.get("PYTHONPATH", "")
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(p for p in (path, str(ROOT)) if p),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with Forks(["torch", "triton", "triton.language"], env, ROOT) as forks:
        yield forks


@pytest.fixture
def interpret(forks: Forks, tmp_path: Path) -> Interpret:
    """Run `body` after `PREAMBLE` in a process of its own; fail with what it says."""

    def run(body: str, *, repaired: bool) -> None:
        start = "from standins.interpreter import repair; repair(); repair()"
        script = PREAMBLE + (start if repaired else "") + "\n" + textwrap.dedent(body)
        # Triton reads a kernel's source from its file.
        source = tmp_path / "kernels_under_test.py"
        source.write_text(script)
        status, said = forks.run([str(source)], tmp_path / "said.txt")
        assert status == 0, said[-2000:]

    return run


def test_every_fp8_and_bf16_code_decodes_exactly(interpret: Interpret) -> None:
    interpret(
        """
        narrow = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)
        for source in narrow:
            x = codes(source)
            same(cast(x, torch.float32), x.float())
            for target in narrow:
                same(cast(x, target), saturated(x, target))
        for source in narrow[:2]:
            same(cast(codes(source), torch.float16), codes(source).half())
        """,
        repaired=True,
    )


def test_rounding_carries_saturation_and_specials(interpret: Interpret) -> None:
    interpret(
        """
        x = hard_floats()
        assert x.numel() > 90_000 and x.isnan().any() and x.isinf().any()
        for target in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):
            same(cast(x, target), saturated(x, target))
        half = x.half()
        for target in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):
            same(cast(half, target), saturated(half, target))
        whole = torch.arange(-70_000, 70_000, 7, dtype=torch.int32)
        same(cast(whole, torch.bfloat16), whole.float().to(torch.bfloat16))
        e4m3 = cast(torch.tensor([31.86, 1e4, -1e4, math.inf]), torch.float8_e4m3fn)
        assert e4m3.float().tolist() == [32.0, 448.0, -448.0, 448.0]
        """,
        repaired=True,
    )


@pytest.mark.parametrize("shape", ["M16-K64-N32", "M1-K128-N16", "M64-K16-N8"])
def test_dot_against_float64(interpret: Interpret, shape: str) -> None:
    m, k, n = (int(part[1:]) for part in shape.split("-"))
    interpret(
        f"""
        g = torch.Generator().manual_seed(1)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            a = torch.randn({m}, {k}, generator=g).to(dtype)
            b = torch.randn({k}, {n}, generator=g).to(dtype)
            out = torch.full(({m}, {n}), math.nan)
            dot_kernel[(1,)](a, b, out, M={m}, K={k}, N={n})
            want = a.double() @ b.double()
            error = (out.double() - want).abs().max() / want.abs().max()
            assert error < 1e-6, (dtype, error)
        """,
        repaired=True,
    )


def test_bf16_arithmetic_rounds_once_from_float32(interpret: Interpret) -> None:
    interpret(
        """
        g = torch.Generator().manual_seed(2)
        a = (torch.randn(4096, generator=g) * 8).bfloat16()
        b = (torch.randn(4096, generator=g) * 8).bfloat16()
        total, product = torch.empty_like(a), torch.empty_like(a)
        less = torch.empty(4096, dtype=torch.int32)
        arith_kernel[(1,)](a, b, total, product, less, N=4096)
        same(total, a + b)
        same(product, -a * b)
        assert torch.equal(less.bool(), a < b)
        """,
        repaired=True,
    )


def test_minimum_and_maximum_of_nan_are_the_other_operand(interpret: Interpret) -> None:
    interpret(
        """
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            a = torch.tensor([math.nan, 3.0, 1.0, -math.inf], dtype=dtype)
            b = torch.tensor([2.0, math.nan, 2.0, math.nan], dtype=dtype)
            least, most = bounds(a, b)
            same(least, torch.tensor([2.0, 3.0, 1.0, -math.inf], dtype=dtype))
            same(most, torch.tensor([2.0, 3.0, 2.0, -math.inf], dtype=dtype))
            for bound in bounds(a, b, tl.PropagateNan.ALL):
                assert bound.isnan().tolist() == [True, True, False, True]
        """,
        repaired=True,
    )


def test_a_bool_may_be_an_argument(interpret: Interpret) -> None:
    interpret(
        """
        for flag, want in ((True, 1), (False, 2)):
            out = torch.zeros(1, dtype=torch.int32)
            flag_kernel[(1,)](out, flag)
            assert out.item() == want
        """,
        repaired=True,
    )


@pytest.mark.parametrize(
    ("fault", "body"),
    [
        (
            "bf16 dot",
            """
            a = torch.ones(16, 16, dtype=torch.bfloat16)
            out = torch.empty(16, 16)
            dot_kernel[(1,)](a, a, out, M=16, K=16, N=16)
            assert not torch.equal(out, torch.full((16, 16), 16.0))
            """,
        ),
        (
            "e4m3 rounding carry",
            """
            got = cast(torch.tensor([31.86]), torch.float8_e4m3fn)
            assert got.float().item() != 32.0
            """,
        ),
        (
            "e4m3 saturation",
            """
            got = cast(torch.tensor([1e4]), torch.float8_e4m3fn)
            assert got.float().item() != 448.0
            """,
        ),
        (
            "e4m3 NaN",
            """
            nan = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
            assert not cast(nan, torch.float32).isnan().any()
            """,
        ),
        (
            "bf16 arithmetic",
            """
            one = torch.ones(2, dtype=torch.bfloat16)
            out = [torch.empty_like(one) for _ in range(2)]
            less = torch.empty(2, dtype=torch.int32)
            arith_kernel[(1,)](one, one, *out, less, N=2)
            assert not torch.equal(out[0].float(), torch.full((2,), 2.0))
            """,
        ),
        (
            "minimum of NaN",
            """
            least, most = bounds(torch.tensor([math.nan, 1.0]), torch.ones(2))
            assert least[0].isnan() and most[0].isnan()
            """,
        ),
        (
            "bool argument",
            """
            try:
                flag_kernel[(1,)](torch.zeros(1, dtype=torch.int32), True)
            except ValueError:
                pass
            else:
                raise AssertionError("a bool is taken")
            """,
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if "\n" not in value else "",
)
def test_the_fault_is_still_in_triton(
    interpret: Interpret, fault: str, body: str
) -> None:
    """When one fails, Triton has fixed `fault`: drop that part of the repair."""
    interpret(body, repaired=False)


def test_round_to_keeps_shape_of_read_only_and_strided_input() -> None:
    from standins.interpreter import round_to

    wide = np.broadcast_to(np.float32(1.5), (3, 4))
    assert (round_to(wide, "fp32", "bf16") == 0x3FC0).all()
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    back = round_to(round_to(turned, "fp32", "bf16"), "bf16", "fp32")
    assert back.shape == (3, 2)
    assert np.array_equal(back.view(np.float32), turned)


def test_speed_up_changes_no_result_and_restores_the_language(
    interpret: Interpret,
) -> None:
    interpret(
        """
        from standins.interpreter_speed import speed_up

        @triton.jit
        def reduce_kernel(x, out, index, M: tl.constexpr, N: tl.constexpr):
            m, n = tl.arange(0, M), tl.arange(0, N)
            rows = tl.load(x + m[:, None] * N + n).to(tl.float32)
            total = tl.zeros([M], tl.float32)
            for step in tl.static_range(2):
                total += tl.sum(rows, axis=1) * (step + 1)
            tl.store(out + m, total + tl.max(rows, axis=1) + tl.cumsum(m, 0))
            tl.store(index + m, tl.argmax(rows, axis=1))

        @triton.jit
        def shapes_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
            m, n = tl.arange(0, M), tl.arange(0, N)
            tile = m[:, None] * N + n[None, :]
            rows = tl.load(x + tile, mask=m[:, None] < M - 1, other=0.5)
            turned = tl.trans(rows) * n[:, None]
            whole = tl.full([M, N], 3, tl.uint8) + 254
            wrapped = whole.to(tl.float32) + m[:, None].to(tl.float32)
            one = tl.load(x).to(tl.float32)
            chosen = tl.where(n < 5, one, wrapped + tl.trans(turned)) * -n + 1.5
            tl.store(out + tile, chosen, mask=n > 2)

        @triton.jit
        def twice(v, scale):
            return v * scale + v * v

        @triton.jit
        def repeated_kernel(x, y, out, ROWS: tl.constexpr, N: tl.constexpr):
            row, n = tl.program_id(0), tl.arange(0, N)
            left = tl.make_block_ptr(x, (ROWS, N), (N, 1), (row, 0), (1, 8), (1, 0))
            total = tl.zeros([1, 8], tl.float32)
            for part in range(N // 8):
                total += twice(tl.load(left).to(tl.float32), part)
                left = tl.advance(left, (0, 8))
            a = tl.load(x + row * N + n).to(tl.float32)
            b = tl.load(y + row * N + n)
            same, other = a * a, a * b
            zeros = (a * 0.0).to(tl.int32, bitcast=True) >> 31
            minus = (a * -0.0).to(tl.int32, bitcast=True) >> 31
            far = (2**31 + n.to(tl.int64) * (row + 1)) % 1000
            small = (n.to(tl.uint8) * 3 + row).to(tl.float32)
            result = same + 3 * other + zeros + 7 * minus + far + small
            tl.store(out + row * N + n, result + tl.sum(total) + (b == b))

        @triton.jit
        def largest(a, b):
            return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

        @triton.jit
        def later(value, place, other, other_place):
            takes = other >= value
            return tl.where(takes, other, value), tl.where(takes, other_place, place)

        @triton.jit
        def combine_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
            m, n = tl.arange(0, M), tl.arange(0, N)
            tile = tl.load(x + m[:, None] * N + n)
            places = (m[:, None] * N + n).to(tl.int32)
            tl.store(out + m, tl.reduce(tile, 1, largest))
            column = tl.reduce(tile, 0, largest, keep_dims=True)
            tl.store(out + M + n[None, :], column)
            value, place = tl.reduce((tile, places), 1, later)
            tl.store(out + 32 + m, value + place)
            value, place = tl.reduce((m.to(tl.float32) % 3, m), 0, later)
            tl.store(out + 48, value + place)
            tl.store(out + 49, tl.reduce(tile, None, largest))

        @triton.jit
        def failing_kernel(x):
            tl.static_assert(False, "on purpose")

        def run():
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
            out, index = torch.empty(8), torch.empty(8, dtype=torch.int32)
            tile = torch.zeros(8, 16)
            reduce_kernel[(1,)](x.bfloat16(), out, index, M=8, N=16)
            shapes_kernel[(1,)](x.bfloat16(), tile, M=8, N=16)
            assert len(tile.unique()) > 64
            rows = torch.zeros(8, 16)
            repeated_kernel[(8,)](x.bfloat16(), x + 1, rows, ROWS=8, N=16)
            assert len(rows.unique()) > 64
            combined = torch.zeros(50)
            y = x.round()
            y[3, 5] = math.nan
            combine_kernel[(1,)](y, combined, M=8, N=16)
            assert combined.isnan().sum() == 3 and combined[48] == 2 + 5
            codes = cast(hard_floats(), torch.float8_e4m3fn)
            return out, index, tile, rows, combined, codes

        def language():
            owners = (tl, tl.core, tl.tensor, tl.math, tl.dtype)
            return [dict(vars(owner)) for owner in owners]

        slow = run()
        speed_up()
        speed_up()
        before = language()
        for _ in range(3):
            for got, want in zip(run(), slow):
                assert torch.equal(bits(got), bits(want))
            assert language() == before
            try:
                failing_kernel[(1,)](torch.zeros(1))
            except Exception as error:
                assert "on purpose" in str(error)
            else:
                raise AssertionError("the kernel did not fail")
            assert language() == before
        """,
        repaired=True,
    )


def test_overflow_is_asserted_in_debug_mode_alone(interpret: Interpret) -> None:
    interpret(
        """
        import dataclasses
        from standins.interpreter_speed import speed_up
        from triton.runtime import interpreter

        @triton.jit
        def next_kernel(x, out):
            tl.store(out, tl.load(x) + 1)

        speed_up()
        last = torch.tensor([2**31 - 1], dtype=torch.int32)
        out = torch.zeros_like(last)
        next_kernel[(1,)](last, out)
        assert out.item() == -(2**31)
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, debug=True)
        next_kernel[(1,)](out, out)
        try:
            next_kernel[(1,)](last, out)
        except Exception as error:
            assert "overflow detected" in str(error), error
        else:
            raise AssertionError("no overflow was seen")
        """,
        repaired=True,
    )
