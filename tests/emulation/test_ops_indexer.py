# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of the indexer against the float64 references of our kernels."""

import pytest
import torch

from emulated_xpu import pins
from emulated_xpu.formats import e2m1_codes
from emulated_xpu.ops import indexer
from kernels.reference import indexer_q, mqa_logits

HEADS, DIM, BLOCK = 8, 128, 16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def rotary_table(positions: int) -> torch.Tensor:
    angle = torch.rand(positions, 32) * 6.3
    return torch.cat((angle.cos(), angle.sin()), -1)


def query_arguments() -> tuple[torch.Tensor, ...]:
    q = torch.randn(5, HEADS, DIM).bfloat16()
    weights = torch.randn(5, HEADS).bfloat16()
    return torch.tensor([0, 3, 9, 2, 7]), q, rotary_table(10), weights


def test_fp8_queries_have_the_reference_bytes() -> None:
    positions, q, table, weights = query_arguments()
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn)
    scaled = torch.empty(weights.shape)
    indexer.deepseek_fused_indexer_q_rope_fp8(
        q, positions, table, weights, 0.25, 0.5, codes, scaled
    )
    expected, expected_weights = indexer_q.fused_indexer_q_rope_quant(
        positions, q, table, weights, 0.25, 0.5
    )
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(scaled.double(), expected_weights)
    differ = codes.view(torch.uint8) != expected.view(torch.uint8)
    assert differ.float().mean() < 1e-3


def test_mxfp4_queries_have_the_reference_bytes() -> None:
    positions, q, table, weights = query_arguments()
    packed = torch.empty(5, HEADS, DIM // 2, dtype=torch.uint8)
    scales = torch.empty(5, HEADS, 4, dtype=torch.uint8)
    scaled = torch.empty(weights.shape)
    indexer.deepseek_fused_indexer_q_rope_mxfp4(
        q, positions, table, weights, 0.25, 0.5, packed, scales, scaled
    )
    (expected, expected_scales), expected_weights = (
        indexer_q.fused_indexer_q_rope_quant(
            positions, q, table, weights, 0.25, 0.5, use_fp4=True
        )
    )
    assert torch.equal(scales.view(torch.int32).squeeze(-1), expected_scales)
    torch.testing.assert_close(scaled.double(), expected_weights)
    assert (packed != expected).float().mean() < 1e-3


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
    ends = torch.tensor([0, 20, 33], dtype=torch.int32)
    keys = torch.empty(33, DIM, dtype=torch.float8_e4m3fn)
    scales = torch.empty(33, 4, dtype=torch.uint8)
    indexer.cp_gather_indexer_k_quant_cache(cache, keys, scales, table, ends)
    raw = cache.as_strided((6, BLOCK * (DIM + 4)), (cache.stride(0), 1))
    for row, (page, token) in {0: (4, 0), 19: (1, 3), 20: (2, 0), 32: (2, 12)}.items():
        value = raw[page, token * DIM : (token + 1) * DIM]
        assert torch.equal(keys.view(torch.uint8)[row], value)
        start = BLOCK * DIM + 4 * token
        assert torch.equal(scales[row], raw[page, start : start + 4])


def test_prefill_logits() -> None:
    arguments = (
        fp8(5, HEADS, DIM),
        fp8(20, DIM),
        torch.rand(20),
        torch.randn(5, HEADS),
        torch.tensor([0, 3, 7, 20, 5]).int(),
        torch.tensor([20, 4, 7, 20, 19]).int(),
    )
    logits = indexer.fp8_mqa_logits(*arguments)
    expected = mqa_logits.fp8_mqa_logits(*arguments)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("next_n", [1, 2])
def test_decode_logits(next_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pins.OVERRIDE, "0.1.9")
    arguments = (
        fp8(2, next_n, HEADS, DIM),
        pages(6).unsqueeze(2),
        torch.randn(2 * next_n, HEADS),
        torch.tensor([20, 31], dtype=torch.int32),
        torch.tensor([[4, 1], [2, 5]], dtype=torch.int32),
        None,
        40,
    )
    logits = indexer.fp8_paged_mqa_logits(*arguments)
    expected = mqa_logits.fp8_paged_mqa_logits(*arguments)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("version", "overflows"), [("0.1.9", True), ("0.1.15.4", False)]
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
