# SPDX-License-Identifier: Apache-2.0
"""Indexer scores over MXFP4 operands against float64."""

import pytest
import torch
from compare import assert_close
from fp8_pages import sparse_memory
from loads import recording_loads

from kernels.reference._quant import E2M1_VALUES
from kernels.reference.indexer import mqa_logits_mxfp4 as reference
from kernels.xpu_dsv4.indexer import mqa_logits_mxfp4
from kernels.xpu_dsv4.indexer._logits import GATHERED, _paged_config

PACKED, SCALES = 64, 4


def codes(*shape):
    return torch.randint(0, 256, (*shape, PACKED), dtype=torch.uint8)


def words(*shape, low=118, high=136):
    """Four UE8M0 bytes in an int32."""
    scales = torch.randint(low, high, (*shape, SCALES), dtype=torch.uint8)
    return scales.view(torch.int32).squeeze(-1)


def assert_scores(mine, want):
    finite = want[want.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    assert_close(mine, want, absolute=2e-6 * scale, relative=2e-6, name="scores")


def both(function, arguments, device):
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    want = getattr(reference, function)(*arguments)
    out = torch.full(want.shape, -torch.inf, dtype=torch.float32, device=device)
    mine = getattr(mqa_logits_mxfp4, function)(*moved, out=out)
    assert mine is out
    assert_scores(mine, want)
    return mine


def flat_case(rows, keys, heads):
    starts = torch.randint(0, keys + 1, (rows,)).int()
    ends = torch.randint(0, keys + 1, (rows,)).int()
    starts[0], ends[0] = 0, keys
    if rows > 1:
        starts[1], ends[1] = keys, keys
    return (
        codes(rows, heads),
        words(rows, heads),
        codes(keys),
        words(keys),
        torch.randn(rows, heads),
        starts,
        ends,
    )


@pytest.mark.parametrize(
    ("rows", "keys", "heads"),
    [(1, 63, 64), (9, 64, 8), (17, 130, 5), (2, 1, 128), (33, 300, 3)],
)
def test_mqa_logits(rows, keys, heads, device):
    torch.manual_seed(rows)
    both("mxfp4_mqa_logits", flat_case(rows, keys, heads), device)


TILE = GATHERED.block_n
"""Keys per program where keys are gathered."""


@pytest.mark.parametrize("keys", [TILE - 1, TILE + 1, 2 * TILE + 63])
def test_rows_that_end_in_the_last_tile_and_before_it(keys, device):
    """Bounds at each edge of a tile, rows without keys, and nothing written outside."""
    torch.manual_seed(keys)
    edges = [0, 1, TILE - 1, TILE, keys - 1, keys]
    bounds = [(a, b) for a in edges for b in edges]
    rows = len(bounds)
    q, q_scales, kv, kv_scales, weights, *_ = flat_case(rows, keys, 7)
    starts, ends = torch.tensor(bounds, dtype=torch.int32).t().contiguous()
    both(
        "mxfp4_mqa_logits",
        (q, q_scales, kv, kv_scales, weights, starts, ends),
        device,
    )


@pytest.mark.parametrize("heads", [1, 17, 64])
def test_bounds_outside_the_keys(heads, device):
    torch.manual_seed(heads)
    q, q_scales, kv, kv_scales, weights, *_ = flat_case(3, 2 * TILE + 5, heads)
    starts = torch.tensor([-9, 3, 300], dtype=torch.int32)
    ends = torch.tensor([2, 999, -1], dtype=torch.int32)
    both(
        "mxfp4_mqa_logits",
        (q, q_scales, kv, kv_scales, weights, starts, ends),
        device,
    )


@pytest.mark.parametrize(
    ("place", "low"), [(0, 2), (0, 127), (46, 127), (46, 150), (63, 127), (63, 2)]
)
def test_both_codes_of_every_byte_are_exact(place, low, device):
    """Of keys and of queries, against dims of +1 and -1, at scales from 2^-125 on."""
    every = torch.zeros(256, PACKED, dtype=torch.uint8)
    every[:, place] = torch.arange(256, dtype=torch.uint8)
    exponents = torch.tensor([low, low + 1, low + 2, low + 3], dtype=torch.uint8)
    scales = exponents.view(torch.int32).repeat(256)
    ones = torch.zeros(4, PACKED, dtype=torch.uint8)
    ones[:, place] = torch.tensor([0x02, 0x20, 0x0A, 0xA0], dtype=torch.uint8)
    one = torch.full((4,), 0x7F7F7F7F, dtype=torch.int32)
    values = reference.mxfp4_values(every, exponents.expand(256, 4))
    pair = values[:, 2 * place : 2 * place + 2]
    want = torch.cat((pair, -pair), 1).relu()  # [256, 4]
    for (q, q_scales), (kv, kv_scales), wanted in (
        ((ones, one), (every, scales), want.t()),
        ((every, scales), (ones, one), want),
    ):
        rows, keys = len(q), len(kv)
        arguments = (
            q[:, None],
            q_scales[:, None],
            kv,
            kv_scales,
            torch.ones(rows, 1),
            torch.zeros(rows, dtype=torch.int32),
            torch.full((rows,), keys, dtype=torch.int32),
        )
        mine = mqa_logits_mxfp4.mxfp4_mqa_logits(*(x.to(device) for x in arguments))
        assert torch.equal(mine.double().cpu(), wanted)


def test_signed_bytes_and_strides(device):
    """DeepGEMM's tag for packed values is int8; rows may have gaps."""
    torch.manual_seed(1)
    q, q_scales, kv, kv_scales, weights, starts, ends = flat_case(5, 70, 6)
    wide = torch.zeros(70, 100, dtype=torch.uint8)
    wide[:, 16:80] = kv
    arguments = (
        q.view(torch.int8),
        q_scales,
        wide[:, 16:80].view(torch.int8),
        kv_scales,
        torch.cat((weights, weights), 1)[:, :6],
        starts,
        ends,
    )
    both("mxfp4_mqa_logits", arguments, device)


def test_every_code_counts_with_its_block(device):
    """Each of the 16 codes of q, in each of the four blocks, enters with its value."""
    key = torch.zeros(SCALES, 128)
    for block in range(SCALES):
        key[block, 32 * block + 5] = 1.0
    kv = torch.zeros(SCALES, PACKED, dtype=torch.uint8)
    for block in range(SCALES):
        kv[block, (32 * block + 5) // 2] = 2 << 4  # 1.0 at an odd place
    q = torch.zeros(16, 1, PACKED, dtype=torch.uint8)
    for code in range(16):
        for block in range(SCALES):
            q[code, 0, (32 * block + 5) // 2] = code << 4
    exponents = torch.tensor([127, 128, 100, 150], dtype=torch.uint8)
    arguments = (
        q,
        exponents.view(torch.int32).expand(16, 1).contiguous(),
        kv,
        torch.full((SCALES,), 0x7F7F7F7F, dtype=torch.int32),
        torch.ones(16, 1),
        torch.zeros(16, dtype=torch.int32),
        torch.full((16,), SCALES, dtype=torch.int32),
    )
    mine = both("mxfp4_mqa_logits", arguments, device).cpu()
    grid = torch.tensor(E2M1_VALUES).double()
    values = torch.cat((grid, -grid)).relu()
    wanted = values[:, None] * torch.exp2(exponents.double() - 127)
    assert torch.equal(mine.double(), wanted)


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (4, 0)])
def test_mqa_logits_empty(rows, keys, device):
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    out = mqa_logits_mxfp4.mxfp4_mqa_logits(
        codes(rows, 4).to(device),
        words(rows, 4).to(device),
        codes(keys).to(device),
        words(keys).to(device),
        torch.ones(rows, 4, device=device),
        zeros,
        zeros,
    )
    assert out.shape == (rows, keys)


def pages(blocks, block_size, stride):
    raw = torch.randint(0, 256, (blocks, stride), dtype=torch.uint8)
    raw[:, block_size * PACKED : block_size * (PACKED + SCALES)].clamp_(118, 135)
    width = PACKED + SCALES
    return raw.as_strided((blocks, block_size, 1, width), (stride, width, width, 1))


def paged_case(requests, next_n, heads, block_size, width, stride=None):
    per_request = -(-width // block_size)
    blocks = requests * per_request + 1
    cache = pages(blocks, block_size, stride or block_size * 132)
    table = torch.randperm(blocks)[: requests * per_request].int()
    return [
        codes(requests, next_n, heads),
        words(requests, next_n, heads),
        cache,
        torch.randn(requests * next_n, heads),
        torch.randint(next_n, width + 1, (requests,)).int(),
        table.view(requests, per_request),
        None,
        width,
    ]


@pytest.mark.parametrize(
    ("requests", "next_n", "heads", "block_size", "width"),
    [
        (1, 1, 64, 64, 70),
        (3, 2, 8, 16, 111),
        (2, 1, 128, 64, 64),
        (2, 3, 5, 1, 9),
        (2, 2, 17, 32, 321),
        (3, 1, 33, 96, 257),
        (1, 4, 1, 64, 63),
        (2, 1, 100, 128, 256),
    ],
)
def test_paged_mqa_logits(requests, next_n, heads, block_size, width, device):
    torch.manual_seed(width)
    arguments = paged_case(requests, next_n, heads, block_size, width)
    both("mxfp4_paged_mqa_logits", arguments, device)


def test_paged_lengths_of_each_row(device):
    torch.manual_seed(2)
    arguments = paged_case(3, 2, 8, 16, 90)
    arguments[4] = torch.tensor([[0, 1], [17, 90], [64, 3]], dtype=torch.int32)
    both("mxfp4_paged_mqa_logits", arguments, device)


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_programs_go_over_several_tiles(next_n, device):
    """Of 16 tokens a program takes two tiles, 512 keys: one, both, and part of one."""
    torch.manual_seed(next_n)
    lens = [next_n, 31, 32, 33, 255, 256, 257, 511, 512, 513, 700, 0, 9, 64, 400, 900]
    arguments = paged_case(len(lens), next_n, 8, 32, 900)
    arguments[4] = torch.tensor(lens, dtype=torch.int32)
    mine = both("mxfp4_paged_mqa_logits", arguments, device)
    assert mine.isfinite().sum(1)[next_n - 1 :: next_n].tolist() == lens


@pytest.mark.parametrize(("block_size", "tile"), [(64, 256), (16, 128)])
def test_paged_ends_a_row_with_the_tile_of_its_last_key(block_size, tile, device):
    """The caller's top-k takes the lengths, so 1M columns are not filled."""
    if device.type == "cuda":
        tile = 128
    arguments = paged_case(3, 2, 8, block_size, 600)
    arguments[4] = torch.tensor([[3, 70], [0, 0], [tile + 2, 1]], dtype=torch.int32)
    out = torch.full((6, 600), 5.0, device=device)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    mqa_logits_mxfp4.mxfp4_paged_mqa_logits(*moved, out=out)
    written = [tile, tile, 0, 0, 2 * tile, 2 * tile]
    assert (out != 5.0).sum(1).tolist() == written
    finite = [3, 70, 0, 0, tile + 2, 1]
    assert (out.isfinite() & (out != 5.0)).sum(1).tolist() == finite


@pytest.mark.parametrize("place", [0, 13, 46, 63])
@pytest.mark.parametrize("low", [2, 127, 150])
def test_paged_codes_of_every_place_are_exact(place, low, device):
    """Of keys and of queries, against dims of +1 and -1, at scales from 2^-125 on."""
    every = torch.zeros(256, PACKED, dtype=torch.uint8)
    every[:, place] = torch.arange(256, dtype=torch.uint8)
    exponents = torch.tensor([low, low + 1, low + 2, low + 3], dtype=torch.uint8)
    ones = torch.zeros(4, PACKED, dtype=torch.uint8)
    ones[:, place] = torch.tensor([0x02, 0x20, 0x0A, 0xA0], dtype=torch.uint8)
    one = torch.full((SCALES,), 127, dtype=torch.uint8)
    values = reference.mxfp4_values(every, exponents.expand(256, SCALES))
    pair = values[:, 2 * place : 2 * place + 2]
    want = torch.cat((pair, -pair), 1).relu()  # [256, 4]
    chosen = torch.arange(3, 256, 18)
    for q, q_exponents, kv, kv_exponents, wanted in (
        (ones, one, every, exponents, want.t()),
        (every[chosen], exponents, ones, one, want[chosen]),
    ):
        requests, keys = len(q), len(kv)
        blocks = -(-keys // 32)
        cache = torch.zeros(blocks, 32, PACKED + SCALES, dtype=torch.uint8)
        raw = cache.view(blocks, -1)
        for key in range(keys):
            block, row = divmod(key, 32)
            raw[block, row * PACKED : (row + 1) * PACKED] = kv[key]
            first = 32 * PACKED + row * SCALES
            raw[block, first : first + SCALES] = kv_exponents
        arguments = (
            q.view(requests, 1, 1, PACKED),
            q_exponents.view(torch.int32).expand(requests, 1, 1).contiguous(),
            cache,
            torch.ones(requests, 1),
            torch.full((requests,), keys, dtype=torch.int32),
            torch.arange(blocks, dtype=torch.int32).expand(requests, -1).contiguous(),
            None,
            keys,
        )
        mine = mqa_logits_mxfp4.mxfp4_paged_mqa_logits(
            *(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments)
        )
        assert torch.equal(mine.double().cpu(), wanted)


@pytest.mark.parametrize("off", ["queries", "pages"])
def test_paged_bytes_at_odd_addresses(off, device):
    """They are no words, which the form for Intel reads."""
    torch.manual_seed(7)
    arguments = paged_case(2, 1, 8, 32, 100, stride=32 * 68 + 1)
    if off == "queries":
        arguments = paged_case(2, 1, 8, 32, 100)
        wide = torch.zeros(2, 1, 8, PACKED + 3, dtype=torch.uint8)
        wide[..., 1 : PACKED + 1] = arguments[0]
        arguments[0] = wide[..., 1 : PACKED + 1]
    moved = arguments[0].to(device), arguments[2].to(device)
    if device.type != "cpu":
        pytest.skip("a copy to a device has no gaps")
    assert not _paged_config(*moved, fp4=True)[1]
    both("mxfp4_paged_mqa_logits", arguments, device)


@pytest.mark.parametrize(
    ("fp4", "block_size", "block_n", "shared"),
    [
        (True, 64, 256, True),
        (True, 32, 256, True),
        (True, 16, 128, False),
        (True, 48, 128, False),
        (False, 16, 128, True),
        (False, 10, 128, False),
    ],
)
def test_paged_form_by_pages(fp4, block_size, block_n, shared):
    """A sub-group's keys, 32 of MXFP4 and 16 of FP8, lie in one page on Intel."""
    q = torch.empty(2, 1, 8, PACKED if fp4 else 128, dtype=torch.uint8, device="meta")
    cache = torch.empty(3, block_size, 68, dtype=torch.uint8, device="meta")
    config, is_shared = _paged_config(q, cache, fp4)
    assert (config.block_n, is_shared) == (block_n, shared)
    assert not _paged_config(q, cache[:0], fp4)[1]


@pytest.mark.parametrize("block_size", [16, 32])
def test_paged_ignores_pages_outside_the_cache(block_size, device):
    torch.manual_seed(3)
    length = 4 * block_size
    arguments = paged_case(2, 1, 8, block_size, length)
    arguments[4] = torch.tensor([length, length], dtype=torch.int32)
    arguments[5][0, 1] = -1
    arguments[5][1, 2] = arguments[2].shape[0]
    both("mxfp4_paged_mqa_logits", arguments, device)


@pytest.mark.parametrize("block_size", [16, 48, 10, 32, 96])
def test_paged_loads_stay_in_their_tensors(block_size, device):
    if device.type != "cpu":
        pytest.skip("the interpreter alone records loads")
    torch.manual_seed(5)
    arguments = paged_case(3, 2, 5, block_size, 4 * block_size)
    arguments[4] = torch.tensor([[0, 0], [block_size, 1], [64, 33]]).int()
    blocks = arguments[2].shape[0]
    arguments[5] = torch.tensor(
        [[0, -1, 2, 1], [3, blocks, -1, 7], [-5, 0, 1, 10**6]]
    ).int()
    with recording_loads() as loads:
        both("mxfp4_paged_mqa_logits", arguments, device)
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    inside = sum(sum(loads.within(tensor).values()) for tensor in tensors)
    assert inside == loads.total > 0


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("queries", "keys"), [(254, 127), (200, 200)])
def test_paged_heads_that_do_not_exist_add_nothing(queries, keys, block_size, device):
    """Five heads are padded; scores that overflow are infinite, never NaN."""
    torch.manual_seed(6)
    arguments = paged_case(1, 1, 5, block_size, block_size)
    arguments[0].fill_(0x77)
    arguments[1] = words(1, 1, 5, low=queries, high=queries + 1)
    stride = block_size * 132
    cache = arguments[2].as_strided((2, stride), (stride, 1))
    cache[:, : block_size * PACKED] = 0x77
    cache[:, block_size * PACKED : block_size * (PACKED + SCALES)] = keys
    arguments[3].fill_(1.0)
    arguments[4].fill_(block_size)
    out = torch.full((1, block_size), 5.0, device=device)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    mqa_logits_mxfp4.mxfp4_paged_mqa_logits(*moved, out=out)
    assert out.isposinf().all(), out


def test_paged_beyond_two_gigabytes(device):
    """Only two pages of the cache are touched; their distance needs 64 bits."""
    torch.manual_seed(4)
    stride, blocks, width = 8640, 2**31 // 8640 + 3, PACKED + SCALES
    raw = sparse_memory(blocks * stride, device)
    shape, strides = (blocks, 64, 1, width), (stride, width, width, 1)
    cache = raw.as_strided(shape, strides)
    small = pages(2, 64, stride)
    cache[0], cache[-1] = small[0].to(device), small[1].to(device)
    lens = torch.tensor([100], dtype=torch.int32)
    q, scales, weights = codes(1, 1, 8), words(1, 1, 8), torch.randn(1, 8)
    table = torch.tensor([[0, blocks - 1]], dtype=torch.int32)
    mine = mqa_logits_mxfp4.mxfp4_paged_mqa_logits(
        q.to(device),
        scales.to(device),
        cache,
        weights.to(device),
        lens.to(device),
        table.to(device),
        None,
        128,
    )
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    want = reference.mxfp4_paged_mqa_logits(
        q, scales, small, weights, lens, table, None, 128
    )
    assert_scores(mine[:, :100], want[:, :100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: codes(3, 8)[..., :32]}, "q.shape"),
        ({0: codes(3, 8).float()}, "q"),
        ({1: words(3, 7)}, "q_scales"),
        ({2: codes(9)[:, :60]}, "kv"),
        ({3: torch.ones(9)}, "kv_scales"),
        ({4: torch.ones(3, 8).double()}, "weights"),
        ({5: torch.zeros(2, dtype=torch.int32)}, "cu_seqlen_ks"),
    ],
)
def test_bad_input_is_named(change, message, device):
    arguments = list(flat_case(3, 9, 8))
    for place, value in change.items():
        arguments[place] = value
    moved = [x.to(device) for x in arguments]
    with pytest.raises(ValueError, match=message):
        mqa_logits_mxfp4.mxfp4_mqa_logits(*moved)


def test_bad_pages_are_named(device):
    arguments = paged_case(2, 1, 8, 16, 64)
    arguments[2] = arguments[2][..., :60]
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    with pytest.raises(ValueError, match="kv_cache"):
        mqa_logits_mxfp4.mxfp4_paged_mqa_logits(*moved)
