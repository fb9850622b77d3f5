# SPDX-License-Identifier: Apache-2.0
"""Dequantizing gathers: every code, every exponent, every kind of slot, bit by bit."""

import pytest
import torch
from fp8_pages import TOKEN, empty_pages, filled_pages, sparse_memory, write_token
from loads import recording_loads

from kernels.reference.kv import gather as reference
from kernels.xpu_dsv4.kv import gather


def gather_pages(cache, table, device):
    """All tokens of the pages in `table`, one request a row; ours and the reference."""
    requests, pages = table.shape
    tokens = pages * cache.shape[1]
    lens = torch.full((requests,), tokens, dtype=torch.int32)
    out = torch.empty(requests, tokens + 2, 512, dtype=torch.bfloat16, device=device)
    want = torch.empty(requests, tokens, 512, dtype=torch.bfloat16)
    gather.dequantize_and_gather_k_cache(
        out, cache, lens.to(device), None, table.to(device), cache.shape[1], 0
    )
    reference.dequantize_and_gather_k_cache(
        want, cache.cpu(), lens, None, table, cache.shape[1], 0
    )
    assert bool(out[:, -2:].isnan().all()), "rows past the last token were written"
    return out[:, :-2].cpu(), want


def test_a_corrupt_page_shows(device):
    """A NaN code gives NaN, as in the reference; no value of exponent 255 is finite."""
    cache = filled_pages(1, 4, 0, torch.device("cpu"))
    page = cache[0].reshape(-1)
    page[5], page[TOKEN + 70], page[TOKEN + 447] = 0x7F, 0xFF, 0x7F
    page[4 * TOKEN + 2 * 8 + 3] = 0xFF  # block 3 of token 2
    moved = empty_pages(1, 4, device)
    moved.copy_(cache)
    out, want = gather_pages(moved, torch.zeros(1, 1, dtype=torch.int32), device)
    block = slice(3 * 64, 4 * 64)
    assert not out[0, 2, block].isfinite().any()
    out[0, 2, block] = want[0, 2, block] = 0
    assert out.isnan().nonzero().tolist() == [[0, 0, 5], [0, 1, 70], [0, 1, 447]]
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("block_size", [1, 2, 7, 64, 256])
def test_pages_in_any_order_and_outside_the_cache(block_size, device):
    blocks = max(2, 96 // block_size)
    cache = filled_pages(blocks, block_size, block_size, device, extra=64)
    hard = [0, blocks - 1, -1, blocks, blocks + 7, -(2**31), 2**31 - 1, 0]
    # Each once, and the pages of a row in falling order, too.
    table = torch.tensor([hard[:4][::-1], hard[4:]], dtype=torch.int32)
    out, want = gather_pages(cache, table, device)
    assert torch.equal(out, want)


def test_pages_may_have_an_axis_of_one_head(device):
    cache = filled_pages(3, 7, 7, device)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    out, _ = gather_pages(cache, table, device)
    again = torch.empty(1, 14, 512, dtype=torch.bfloat16, device=device)
    lens = torch.tensor([14], dtype=torch.int32, device=device)
    gather.dequantize_and_gather_k_cache(
        again, cache.unsqueeze(2), lens, None, table.to(device), 7, 0
    )
    assert torch.equal(again.cpu(), out)


def test_every_code_and_exponent(device):
    """All finite codes under all exponents but 255, whose scale is not a number."""
    cache = empty_pages(4, 64, torch.device("cpu"))
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F] + [0, 1])
    for slot in range(255):
        page = cache[slot // 64].reshape(-1)
        position = slot % 64
        row = torch.zeros(448, dtype=torch.uint8)
        row[:256] = codes
        page[position * 576 : position * 576 + 448] = row
        page[position * 576 + 448 : position * 576 + 576] = 0
        page[64 * 576 + position * 8 : 64 * 576 + position * 8 + 7] = slot
    moved = empty_pages(4, 64, device)
    moved.copy_(cache)
    table = torch.arange(4, dtype=torch.int32)[None]
    out, want = (x[0, :255] for x in gather_pages(moved, table, device))
    tiny = want.float().abs() < 2.0**-126
    assert torch.equal(out[~tiny].view(torch.int16), want[~tiny].view(torch.int16))
    assert bool((out[tiny].float().abs() < 2.0**-125).all())


@pytest.mark.parametrize("block_size", [2, 7, 64])
@pytest.mark.parametrize("part", [False, True], ids=["all", "tail"])
def test_paged(block_size, part, device):
    cache = filled_pages(max(3, 64 // block_size), block_size, 1, device)
    seq_lens = torch.tensor([0, 1, 19, 3 * block_size, 5], dtype=torch.int32)
    width = -(-int(seq_lens.max()) // block_size) + 1
    table = torch.randint(0, cache.shape[0], (5, width), dtype=torch.int32)
    table[2, 0] = -1
    table[4, 0] = cache.shape[0]
    gather_lens = torch.tensor([0, 1, 4, block_size + 1, 5], dtype=torch.int32)
    lens = gather_lens if part else None
    rows = int(seq_lens.max()) + 6
    out = torch.empty(6, rows, 512, dtype=torch.bfloat16, device=device)
    want = torch.empty(6, rows, 512, dtype=torch.bfloat16)
    gather.dequantize_and_gather_k_cache(
        out,
        cache,
        seq_lens.to(device),
        None if lens is None else lens.to(device),
        table.to(device),
        block_size,
        3,
    )
    reference.dequantize_and_gather_k_cache(
        want, cache.cpu(), seq_lens, lens, table, block_size, 3
    )
    assert torch.equal(out.cpu().view(torch.int16), want.view(torch.int16))


def test_paged_rows_past_out_are_not_written(device):
    cache = filled_pages(2, 7, 1, device)
    whole = torch.empty(2, 16, 512, dtype=torch.bfloat16, device=device)
    lens = torch.tensor([14, 9], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device)
    gather.dequantize_and_gather_k_cache(whole[:, :8], cache, lens, None, table, 7, 2)
    assert bool(whole[:, :2].isnan().all()) and bool(whole[:, 8:].isnan().all())
    assert not bool(whole[:, 2:8].isnan().any())


def test_cache_beyond_two_gibibytes(device):
    blocks, stride = 57_500, 37_440
    raw = sparse_memory(blocks * stride, device)
    cache = raw.as_strided((blocks, 64, 584), (stride, 584, 1))
    generator = torch.Generator().manual_seed(3)
    table = torch.tensor([[blocks - 1], [57_400], [0]], dtype=torch.int32)
    for block, position in zip(table[:, 0].tolist(), (63, 3, 5), strict=True):
        write_token(cache, block * 64 + position, generator)
    out, want = gather_pages(cache, table, device)
    assert torch.equal(out, want)


def test_each_byte_is_read_once(device):
    if device.type != "cpu":
        pytest.skip("loads are counted by the interpreter, which runs on a CPU only")
    cache = filled_pages(2, 64, 1, device)
    out = torch.empty(3, 40, 512, dtype=torch.bfloat16, device=device)
    lens = torch.tensor([1, 0, 36], dtype=torch.int32, device=device)
    table = torch.tensor([[1], [0], [0]], dtype=torch.int32, device=device)
    with recording_loads() as loads:
        gather.dequantize_and_gather_k_cache(out, cache, lens, None, table, 64, 0)
    touched = loads.within(cache)
    assert sum(touched.values()) == 37 * 584
    assert set(touched.values()) == {1}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out.shape", {"out": torch.zeros(4, 512).bfloat16()}),
        ("k_cache.dtype", {"k_cache": torch.zeros(1, 4, 584)}),
        ("seq_lens.dtype", {"seq_lens": torch.zeros(2)}),
        ("gather_lens.shape", {"gather_lens": torch.zeros(3, dtype=torch.int32)}),
        ("block_table.shape", {"block_table": torch.zeros(2, dtype=torch.int32)}),
        ("block_size", {"block_size": 8}),
        ("offset", {"offset": -1}),
    ],
)
def test_bad_paged_arguments(name, change, device):
    arguments = {
        "out": torch.zeros(2, 4, 512, dtype=torch.bfloat16),
        "k_cache": torch.zeros(1, 4, 584, dtype=torch.uint8),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "gather_lens": None,
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "block_size": 4,
        "offset": 0,
    }
    arguments.update(change)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        gather.dequantize_and_gather_k_cache(**arguments)
