# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of the indexer against the float64 references of our kernels."""

from typing import Any

import pytest
import torch

from kernels.reference.indexer import mqa_logits
from standins.emulated_xpu.on_cuda.forms import indexer as on_cuda
from standins.emulated_xpu.ops import indexer
from standins.emulated_xpu.wheel import pins
from standins.emulated_xpu.wheel.formats import e2m1_codes

HEADS, DIM, BLOCK = 8, 128, 64


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def rotary_table(positions: int) -> torch.Tensor:
    angle = torch.rand(positions, 32) * 6.3
    return torch.cat((angle.cos(), angle.sin()), -1)


def query_arguments() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(5, HEADS, DIM).bfloat16()
    q[..., :8] *= 2.0**-13  # subnormals of e4m3
    weights = torch.randn(5, HEADS).bfloat16()
    return torch.tensor([0, 3, 9, 2, 7]), q, rotary_table(10), weights


def scaled_queries(exponents: torch.Tensor, block: int) -> torch.Tensor:
    """The rotated queries by their scales, as the kernels round them."""
    positions, q, table, weights = query_arguments()
    x = indexer._rotated(q, positions, table, weights, 2).unflatten(-1, (-1, block))
    return torch.ldexp(x, -exponents[..., None])


def kernel_queries(device: torch.device, use_fp4: bool) -> tuple[torch.Tensor, ...]:
    """Codes, scales and weights of the Triton kernel; FP8 has its scales in weights."""
    from kernels.xpu_dsv4.indexer.indexer_q import fused_indexer_q_rope_quant

    arguments = [x.to(device) for x in query_arguments()]
    codes, weights = fused_indexer_q_rope_quant(*arguments, 0.25, 0.5, use_fp4=use_fp4)
    codes, scales = codes if isinstance(codes, tuple) else (codes, weights)
    return codes.cpu().view(torch.uint8), scales.cpu(), weights.cpu()


def test_fp8_queries_are_the_kernel_s_but_for_midpoints_and_subnormals(
    kernel_device: torch.device,
) -> None:
    positions, q, table, weights = query_arguments()
    q_fp8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn)
    scaled = torch.empty(weights.shape)
    indexer.deepseek_fused_indexer_q_rope_fp8(
        q, positions, table, weights, 0.25, 0.5, q_fp8, scaled
    )
    codes, _, wanted = kernel_queries(kernel_device, use_fp4=False)
    assert torch.equal(scaled, wanted)
    exponents = torch.frexp(scaled / (weights.float() * 0.125)).exponent - 1
    x = scaled_queries(exponents[..., None], DIM).flatten(-2).abs()
    mine, theirs = (c.view(torch.uint8).int() & 0x7F for c in (q_fp8, codes))
    midpoint = (x.view(torch.int32) & 0xFFFFF) == 0x80000
    small = x < 2**-6
    assert torch.equal(mine[~midpoint & ~small], theirs[~midpoint & ~small])
    up = (mine - theirs)[midpoint & ~small]
    assert set(up.tolist()) == {0, 1}, "a midpoint goes away from zero"
    assert (theirs - mine)[small].abs().max() <= 1
    assert midpoint.float().mean() > 0.02


def test_mxfp4_queries_are_the_kernel_s_but_for_midpoints(
    kernel_device: torch.device,
) -> None:
    positions, q, table, weights = query_arguments()
    packed = torch.empty(5, HEADS, DIM // 2, dtype=torch.uint8)
    scales = torch.empty(5, HEADS, 4, dtype=torch.uint8)
    scaled = torch.empty(weights.shape)
    indexer.deepseek_fused_indexer_q_rope_mxfp4(
        q, positions, table, weights, 0.25, 0.5, packed, scales, scaled
    )
    codes, kernel_scales, wanted = kernel_queries(kernel_device, use_fp4=True)
    assert torch.equal(scales.view(torch.int32).squeeze(-1), kernel_scales)
    assert torch.equal(scaled, wanted)
    x = scaled_queries(scales.int() - 127, 32).flatten(-2).abs()
    mine, theirs = (
        torch.stack((c & 7, c >> 4 & 7), -1).flatten(-2).int() for c in (packed, codes)
    )
    midpoint = torch.isin(x, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert torch.equal(mine[~midpoint], theirs[~midpoint])
    assert set((theirs - mine)[midpoint].tolist()) == {0, 1}, "towards zero"


def test_fp8_codes_of_all_bf16_values() -> None:
    bits = torch.arange(2**15, dtype=torch.int32) << 16
    x = bits.view(torch.float32)
    x = x[x <= 1000]
    codes, exact = indexer.e4m3_codes(x), x.clamp(max=448).to(torch.float8_e4m3fn)
    value = codes.view(torch.float8_e4m3fn).float()
    error = (value - x.clamp(max=448)).abs()
    nearest = (exact.float() - x.clamp(max=448)).abs()
    large = x >= 2**-6
    assert torch.equal(error[large], nearest[large]), "as near as the nearest"
    assert error[~large].max() < 2**-9
    assert torch.equal(indexer.e4m3_codes(-x), codes | 0x80)


def test_queries_that_the_kernels_would_misread_are_refused() -> None:
    positions, q, table, weights = query_arguments()
    outputs = torch.empty(q.shape, dtype=torch.float8_e4m3fn), torch.empty(5, HEADS)
    for bad in (
        (q.float(), positions, table, weights),
        (q, positions.int(), table, weights),
        (q, positions, table, weights.t().contiguous().t()),
        (q[:, :5].contiguous(), positions, table, weights[:, :5].contiguous()),
    ):
        with pytest.raises(ValueError, match="indexer queries"):
            indexer.deepseek_fused_indexer_q_rope_fp8(*bad, 0.25, 0.5, *outputs)


def test_midpoints_of_e2m1_go_to_the_even_code() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -2.5])
    assert e2m1_codes(x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 12]


def pages(blocks: int) -> torch.Tensor:
    """FP8 pages with a padded block stride."""
    width = DIM + 4
    raw = torch.zeros(blocks, BLOCK * width + 48, dtype=torch.uint8)
    raw[:, : BLOCK * DIM] = fp8(blocks, BLOCK * DIM).view(torch.uint8)
    raw[:, BLOCK * DIM : BLOCK * width] = torch.rand(blocks, BLOCK).view(torch.uint8)
    return raw.as_strided((blocks, BLOCK, width), (raw.stride(0), width, 1))


def test_gather_takes_values_and_scales_of_each_request() -> None:
    cache, table = pages(6), torch.tensor([[4, 1], [2, 5]], dtype=torch.int32)
    ends = torch.tensor([0, 68, 81], dtype=torch.int32)
    keys = torch.empty(81, DIM, dtype=torch.float8_e4m3fn)
    scales = torch.empty(81, 4, dtype=torch.uint8)
    indexer.cp_gather_indexer_k_quant_cache(cache, keys, scales, table, ends)
    raw = cache.as_strided((6, BLOCK * (DIM + 4)), (cache.stride(0), 1))
    for row, (page, token) in {0: (4, 0), 67: (1, 3), 68: (2, 0), 80: (2, 12)}.items():
        value = raw[page, token * DIM : (token + 1) * DIM]
        assert torch.equal(keys.view(torch.uint8)[row], value)
        start = BLOCK * DIM + 4 * token
        assert torch.equal(scales[row], raw[page, start : start + 4])


def prefill_arguments() -> list[torch.Tensor]:
    return [
        fp8(5, HEADS, DIM),
        fp8(20, DIM),
        torch.rand(20),
        torch.randn(5, HEADS),
        torch.tensor([0, 3, 7, 20, 5]).int(),
        torch.tensor([20, 4, 7, 20, 19]).int(),
    ]


def test_prefill_logits() -> None:
    arguments = prefill_arguments()
    logits = indexer.fp8_mqa_logits(*arguments)
    expected = mqa_logits.fp8_mqa_logits(*arguments)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def decode_arguments(next_n: int) -> list[Any]:
    return [
        fp8(2, next_n, HEADS, DIM),
        pages(6).unsqueeze(2),
        torch.randn(2 * next_n, HEADS),
        torch.tensor([70, 127], dtype=torch.int32),
        torch.tensor([[4, 1], [2, 5]], dtype=torch.int32),
        None,
        130,
    ]


@pytest.mark.parametrize("next_n", [1, 2])
def test_decode_logits(next_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pins.OVERRIDE, "0.1.11.1")
    arguments = decode_arguments(next_n)
    logits = indexer.fp8_paged_mqa_logits(*arguments)
    expected = mqa_logits.fp8_paged_mqa_logits(*arguments)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def spread(given: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them."""
    return torch.stack((given, given), -1)[..., 0]


@pytest.mark.parametrize("module", [indexer, on_cuda], ids=["stand-in", "form"])
@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (3, lambda lens: lens[:, None], r"context_lens: \(2, 1\)"),
        (3, lambda lens: lens[:, None].repeat(1, 2), r"context_lens: \(2, 2\)"),
        (3, lambda lens: lens[:1], r"context_lens: \(1,\)"),
        (3, torch.Tensor.long, "context_lens.* of torch.int64"),
        (3, spread, "context_lens must be contiguous"),
        (0, spread, "q_fp8 must be contiguous"),
        (1, lambda cache: cache[:, :32], r"a page: \(1, 32, 1, 132\)"),
        (1, lambda cache: cache.squeeze(2), r"a page: \(1, 64, 132\)"),
        (1, lambda cache: cache[..., :100], r"a page: \(1, 64, 1, 100\)"),
        (2, torch.Tensor.bfloat16, "weights.* of torch.bfloat16"),
        (2, lambda weights: weights[:3], r"weights: \(3, 8\)"),
        (4, lambda table: table[:, :1], "block_tables must be contiguous"),
        (4, torch.Tensor.long, "block_tables.* of torch.int64"),
    ],
)
def test_decode_logits_that_the_op_refuses(
    place: int, change: Any, message: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pins.OVERRIDE, "0.1.16.2")
    arguments = decode_arguments(2)
    arguments[place] = change(arguments[place])
    with pytest.raises(ValueError, match=f"fp8_paged_mqa_logits: {message}"):
        module.fp8_paged_mqa_logits(*arguments)


@pytest.mark.parametrize("module", [indexer, on_cuda], ids=["stand-in", "form"])
@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, torch.Tensor.bfloat16, "q.* of torch.bfloat16"),
        (1, spread, "kv must be contiguous"),
        (2, lambda scales: scales[:, None], r"kv_scales: \(20, 1\)"),
        (3, torch.Tensor.bfloat16, "weights.* of torch.bfloat16"),
        (4, torch.Tensor.long, "cu_seqlen_ks.* of torch.int64"),
        (5, lambda ends: ends[:4], r"cu_seqlen_ke: \(4,\)"),
    ],
)
def test_prefill_logits_that_the_op_refuses(
    place: int, change: Any, message: str, module: Any
) -> None:
    arguments = prefill_arguments()
    arguments[place] = change(arguments[place])
    with pytest.raises(ValueError, match=f"fp8_mqa_logits: {message}"):
        module.fp8_mqa_logits(*arguments)


@pytest.mark.parametrize(
    ("version", "overflows"), [("0.1.8", True), ("0.1.15.4", False)]
)
def test_early_versions_refuse_pages_beyond_two_gigabytes(
    version: str, overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pins.OVERRIDE, version)
    stride, width = 2**24, DIM + 4
    raw = torch.empty(130 * stride, dtype=torch.uint8)
    cache = raw.as_strided((130, BLOCK, 1, width), (stride, width, width, 1))
    cache[129].zero_()
    arguments = (
        fp8(1, 1, HEADS, DIM),
        cache,
        torch.ones(1, HEADS),
        torch.tensor([9], dtype=torch.int32),
        torch.tensor([[129]], dtype=torch.int32),
        None,
        16,
    )
    if overflows:
        with pytest.raises(IndexError, match="page 129"):
            indexer.fp8_paged_mqa_logits(*arguments)
    else:
        assert not indexer.fp8_paged_mqa_logits(*arguments)[0, :9].any()


def test_top_k_of_a_prefill_counts_from_the_first_key_and_pads() -> None:
    logits = torch.tensor([[9.0, 1.0, 5.0, 3.0, 7.0]]).repeat(3, 1)
    starts, ends = torch.tensor([1, 1, 2]).int(), torch.tensor([5, 3, 2]).int()
    indices = torch.full((3, 3), 99, dtype=torch.int32)
    indexer.top_k_per_row_prefill(logits, starts, ends, indices, 3, 5, 1, 3)
    assert sorted(indices[0].tolist()) == [1, 2, 3]
    assert indices[1:].tolist() == [[0, 1, -1], [-1, -1, -1]]


def test_top_k_of_a_decode_reads_one_length_per_request() -> None:
    logits = torch.tensor([[4.0, 8.0, 6.0, 9.0]]).repeat(4, 1)
    indices = torch.full((4, 2), 99, dtype=torch.int32)
    lengths = torch.tensor([[3], [1]], dtype=torch.int32)
    indexer.top_k_per_row_decode(logits, 2, lengths, indices, 4, 4, 1, 2)
    assert [sorted(row) for row in indices.tolist()] == [
        [0, 1],
        [1, 2],
        [-1, -1],
        [-1, 0],
    ]


@pytest.mark.parametrize("module", [indexer, on_cuda], ids=["stand-in", "form"])
@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, spread, r"strides \(16, 2\), not 4 rows of \(8, 1\)"),
        (0, lambda logits: logits[:3], r"\(3, 8\) of strides"),
        (0, torch.Tensor.bfloat16, "logits.* of torch.bfloat16"),
        (2, lambda lens: lens[:1], r"bounds: \(1,\)"),
        (2, spread, "bounds must be contiguous"),
        (2, torch.Tensor.long, "bounds.* of torch.int64"),
        (3, lambda indices: indices[:, :1], r"indices: \(4, 1\)"),
        (3, spread, "indices must be contiguous"),
    ],
)
def test_a_top_k_that_the_ops_refuse(
    place: int, change: Any, message: str, module: Any
) -> None:
    """Of a decode, with a length for two rows, and of a prefill, with two for each."""
    indices = torch.full((4, 2), 99, dtype=torch.int32)
    decode = [torch.randn(4, 8), 2, torch.tensor([8, 3]).int(), indices, 4, 8, 1, 2]
    starts, ends = torch.zeros(4).int(), torch.tensor([8, 3, 2, 1]).int()
    prefill = [decode[0], starts, ends, *decode[3:]]
    for given, op in (
        (decode, module.top_k_per_row_decode),
        (prefill, module.top_k_per_row_prefill),
    ):
        op(*given)
        given[place] = change(given[place])
        with pytest.raises(ValueError, match=f"top_k_per_row: .*{message}"):
            op(*given)
