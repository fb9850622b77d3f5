# SPDX-License-Identifier: Apache-2.0
"""Indexer scores against float64, over gathered keys and over pages."""

import numpy as np
import pytest
import torch
from compare import assert_close
from loads import recording_loads

from kernels.reference.indexer import mqa_logits as reference
from kernels.xpu_dsv4.indexer import _logits, mqa_logits

INF = float("inf")


def fp8(*shape):
    return (torch.randn(*shape) * 3).to(torch.float8_e4m3fn)


def assert_scores(mine, want, name="scores"):
    finite = want[want.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    assert_close(mine, want, absolute=2e-6 * scale, relative=2e-6, name=name)


def both(function, arguments, device):
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    want = getattr(reference, function)(*arguments)
    mine = getattr(mqa_logits, function)(*moved, out=unwritten(want, device))
    assert mine.dtype == torch.float32
    assert_scores(mine, want)
    return mine


def unwritten(want, device):
    """A result whose elements outside the bounds already are as in the reference."""
    return torch.full(want.shape, -INF, dtype=torch.float32, device=device)


def flat_case(rows, keys, heads, dim=128):
    starts = torch.randint(0, keys + 1, (rows,)).int()
    ends = torch.randint(0, keys + 1, (rows,)).int()
    starts[0], ends[0] = 0, keys
    if rows > 2:
        ends[1] = starts[1]
        starts[2], ends[2] = keys, keys
    weights = torch.randn(rows, heads)
    return (
        fp8(rows, heads, dim),
        fp8(keys, dim),
        torch.rand(keys),
        weights,
        starts,
        ends,
    )


@pytest.mark.parametrize(
    ("rows", "keys", "heads"),
    [(1, 63, 64), (3, 111, 64), (9, 64, 8), (17, 130, 5), (2, 1, 128), (63, 40, 16)],
)
def test_mqa_logits(rows, keys, heads, device):
    torch.manual_seed(rows)
    both("fp8_mqa_logits", flat_case(rows, keys, heads), device)


@pytest.mark.parametrize("dim", [32, 64, 256])
def test_mqa_logits_other_sizes(dim, device):
    torch.manual_seed(dim)
    both("fp8_mqa_logits", flat_case(5, 70, 20, dim), device)


def test_mqa_logits_strided_and_into(device):
    torch.manual_seed(1)
    _, _, scales, _, starts, ends = flat_case(7, 90, 6)
    arguments = (
        fp8(7, 9, 200)[:, 1:7, 64:192],
        fp8(90, 160)[:, 16:144],
        scales,
        torch.randn(7, 11)[:, 2:8],
        starts,
        ends,
    )
    moved = [x.to(device) for x in arguments]
    wide = torch.full((7, 100), 5.0, device=device)
    mine = mqa_logits.fp8_mqa_logits(*moved, out=wide[:, :90])
    want = reference.fp8_mqa_logits(*arguments)
    keys = torch.arange(90)
    inside = (keys >= starts[:, None]) & (keys < ends[:, None])
    assert_scores(mine.cpu()[inside], want[inside])
    assert (mine.cpu()[~inside] == 5.0).all() and (wide[:, 90:] == 5.0).all()


def test_every_e4m3_value_counts(device):
    """Each finite code of q and k, subnormals included, enters with its value."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    keys = torch.zeros(254, 32)
    keys[:, 3] = 1.0
    q = torch.zeros(254, 1, 32)
    q[:, 0, 3] = codes.float()
    bounds = torch.zeros(254).int(), torch.full((254,), 2).int()
    arguments = (
        q.to(torch.float8_e4m3fn),
        keys[:2].to(torch.float8_e4m3fn),
        torch.tensor([1.0, 0.5]),
        torch.ones(254, 1),
        *bounds,
    )
    mine = both("fp8_mqa_logits", arguments, device).cpu()
    assert torch.equal(mine[:, 0], codes.float().relu())
    swapped = (
        keys[:1, None].to(torch.float8_e4m3fn),
        q[:, 0].to(torch.float8_e4m3fn),
        torch.ones(254),
        torch.ones(1, 1),
        torch.zeros(1).int(),
        torch.full((1,), 254).int(),
    )
    mine = both("fp8_mqa_logits", swapped, device).cpu()
    assert torch.equal(mine[0], codes.float().relu())


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (4, 0)])
def test_mqa_logits_empty(rows, keys, device):
    q, kv = fp8(rows, 4, 128).to(device), fp8(keys, 128).to(device)
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    weights = torch.ones(rows, 4, device=device)
    scales = torch.ones(keys, device=device)
    out = mqa_logits.fp8_mqa_logits(q, kv, scales, weights, zeros, zeros)
    assert out.shape == (rows, keys)


def key_pages(blocks, block_size, dim=128, stride=None):
    """Pages `[blocks, block_size, 1, dim + 4]`: values, then fp32 scales, padded."""
    size = block_size * (dim + 4)
    stride = stride or -(-size // 576) * 576
    raw = torch.full((blocks, stride), 0x7F, dtype=torch.uint8)
    raw[:, : block_size * dim] = fp8(blocks, block_size * dim).view(torch.uint8)
    raw[:, block_size * dim : size] = torch.rand(blocks, block_size).view(torch.uint8)
    shape = (blocks, block_size, 1, dim + 4)
    return raw.as_strided(shape, (stride, dim + 4, dim + 4, 1))


def on(device, arguments):
    """Copies on a device that keep the page stride."""
    moved = []
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.dtype == torch.uint8:
            blocks, stride = x.shape[0], x.stride(0)
            raw = x.as_strided((blocks, stride), (stride, 1)).contiguous().to(device)
            x = raw.as_strided(x.shape, x.stride())
        moved.append(x.to(device) if isinstance(x, torch.Tensor) else x)
    return moved


def paged_case(lens, next_n, heads, block_size, max_len, dim=128):
    requests = len(lens)
    width = -(-max_len // block_size)
    blocks = requests * width + 3
    table = torch.randperm(blocks)[: requests * width].view(requests, width).int()
    return (
        fp8(requests, next_n, heads, dim),
        key_pages(blocks, block_size, dim),
        torch.randn(requests * next_n, heads),
        torch.tensor(lens).int(),
        table,
        None,
        max_len,
    )


def paged_both(arguments, device):
    want = reference.fp8_paged_mqa_logits(*arguments)
    mine = mqa_logits.fp8_paged_mqa_logits(
        *on(device, arguments), out=unwritten(want, device)
    )
    assert_scores(mine, want)
    return mine


@pytest.mark.parametrize("block_size", [64, 256, 7, 1])
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("heads", [64, 8])
def test_paged(heads, next_n, block_size, device):
    torch.manual_seed(block_size)
    lens = [63, 0, 111, 64, next_n]
    rows = (torch.tensor(lens)[:, None] - torch.arange(next_n)).clamp(min=0)
    for context in (lens, rows.flip(1).tolist(), rows.tolist()):
        paged_both(paged_case(context, next_n, heads, block_size, 130), device)


def test_paged_one_length_a_request_as_a_column(device):
    """vLLM passes `[B, 1]`; next_n = 2 then means causal steps from the last token."""
    torch.manual_seed(2)
    case = paged_case([[9], [70], [1]], 2, 64, 64, 80)
    mine = paged_both(case, device)
    finite = mine.isfinite().sum(1)
    assert finite.tolist() == [8, 9, 69, 70, 0, 1]


def test_paged_reads_each_row_by_its_own_length(device):
    """N3: at ratio 4 both speculative rows may have the same length."""
    torch.manual_seed(3)
    case = paged_case([[16, 16], [16, 17]], 2, 8, 64, 70)
    mine = paged_both(case, device)
    assert mine.isfinite().sum(1).tolist() == [16, 16, 16, 17]


@pytest.mark.parametrize("block_size", [10, 16, 48])
def test_paged_pages_outside_the_cache_score_nothing(block_size, device):
    torch.manual_seed(4)
    length = 6 * block_size
    case = list(paged_case([length, length], 1, 8, block_size, length))
    case[4][0, 2], case[4][0, 5], case[4][1, 0] = -1, 10_000_000, case[1].shape[0]
    mine = paged_both(case, device)
    assert mine.isfinite().sum(1).tolist() == [4 * block_size, 5 * block_size]


@pytest.mark.parametrize("block_size", [16, 48, 10])
def test_paged_loads_stay_in_their_tensors(block_size, device):
    if device.type != "cpu":
        pytest.skip("the interpreter alone records loads")
    lens = [[0, 0], [block_size, 1], [64, 33]]
    case = list(paged_case(lens, 2, 5, block_size, 4 * block_size))
    case[4] = torch.tensor(
        [[0, -1, 2, 1], [3, case[1].shape[0], -1, 7], [-5, 0, 1, 10**6]]
    ).int()
    with recording_loads() as loads:
        paged_both(case, device)
    tensors = [x for x in case if isinstance(x, torch.Tensor)]
    inside = sum(sum(loads.within(tensor).values()) for tensor in tensors)
    assert inside == loads.total > 0


def test_paged_lengths_beyond_table_and_result(device):
    torch.manual_seed(5)
    case = list(paged_case([10_000, 90], 1, 8, 16, 100))
    case[4] = case[4][:, :4]
    mine = paged_both(case, device)
    assert mine.isfinite().sum(1).tolist() == [64, 64]


def test_paged_ends_a_row_with_the_tile_of_its_last_key(device):
    """The caller's top-k takes the lengths, so 1M columns are not filled."""
    case = paged_case([[3, 70], [0, 0], [130, 1]], 2, 8, 64, 300)
    out = torch.full((6, 300), 5.0, device=device)
    mqa_logits.fp8_paged_mqa_logits(*on(device, case), out=out)
    assert (out != 5.0).sum(1).tolist() == [128, 128, 0, 0, 256, 256]
    assert out.isfinite().sum(1).tolist() == [3 + 172, 70 + 172, 300, 300, 174, 45]


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_programs_go_over_several_tiles(next_n, device):
    """Of 9 requests a program takes 2 tiles, 256 keys: one, both, and part of one."""
    torch.manual_seed(next_n)
    lens = [next_n, 127, 128, 129, 255, 256, 257, 0, 900]
    mine = paged_both(paged_case(lens, next_n, 8, 64, 1000), device)
    assert mine.isfinite().sum(1)[next_n - 1 :: next_n].tolist() == lens


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_tiles_go_on_along_another_axis(limit, device, monkeypatch):
    """A grid's second axis ends at 65,535 programs, 4.19 M keys."""
    monkeypatch.setattr(_logits, "_AXIS_LIMIT", limit)
    torch.manual_seed(limit)
    both("fp8_mqa_logits", flat_case(9, 300, 4), device)
    paged_both(paged_case([300, 5], 1, 4, 64, 300), device)


def test_result_of_another_device(device):
    case = paged_case([5], 1, 8, 64, 64)
    with pytest.raises(ValueError, match=r"out\.device = meta: expected cpu"):
        mqa_logits.fp8_paged_mqa_logits(*case, out=torch.empty(1, 64, device="meta"))
    case = flat_case(2, 9, 4)
    with pytest.raises(ValueError, match=r"out\.device = meta: expected cpu"):
        mqa_logits.fp8_mqa_logits(*case, out=torch.empty(2, 9, device="meta"))


def test_paged_without_padding_or_inner_dimension(device):
    torch.manual_seed(6)
    case = list(paged_case([33, 7], 2, 20, 8, 40))
    paged_both(case, device)
    case[1] = key_pages(case[1].shape[0], 8, stride=8 * 132).squeeze(2)
    paged_both(case, device)


def test_paged_addresses_beyond_int32(device):
    """N12: the block stride times the block number exceeds 2^31."""
    stride, block_size = 2**28 + 64, 4
    case = paged_case([7, 4], 1, 8, block_size, 10)
    compact = case[1]
    blocks = 11
    size = (blocks - 1) * stride + 4096
    if device.type == "cpu":
        raw = torch.from_numpy(np.zeros(size, dtype=np.uint8))
    else:
        raw = torch.zeros(size, dtype=torch.uint8, device=device)
    shape = (blocks, block_size, 1, 132)
    far = raw.as_strided(shape, (stride, 132, 132, 1))
    near = case[4].flatten()
    table = torch.arange(blocks - 1, blocks - 1 - len(near), -1).int()
    far[table.long()] = compact[near.long()].to(device)
    mine = on(device, (*case[:1], near, *case[2:4], table.view_as(case[4]), None, 10))
    mine[1] = far
    want = reference.fp8_paged_mqa_logits(*case)
    scores = mqa_logits.fp8_paged_mqa_logits(*mine, out=unwritten(want, device))
    assert_scores(scores, want)


def test_property_based(device):
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is optional")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
    @hypothesis.given(data=st.data())
    def check(data):
        block_size = data.draw(st.integers(1, 70))
        next_n = data.draw(st.integers(1, 3))
        heads = data.draw(st.integers(1, 20))
        max_len = data.draw(st.integers(1, 150))
        length = st.integers(0, max_len)
        row = st.lists(length, min_size=next_n, max_size=next_n)
        lens = data.draw(
            st.one_of(
                st.lists(length, min_size=1, max_size=3),
                st.lists(row, min_size=1, max_size=3),
            )
        )
        case = list(paged_case(lens, next_n, heads, block_size, max_len, 32))
        holes = torch.rand(case[4].shape) < 0.2
        case[4] = case[4].where(~holes, data.draw(st.sampled_from([-1, 10**6])))
        paged_both(case, device)

    torch.manual_seed(7)
    check()


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda c: c[0].view(torch.uint8), "q_fp8.dtype = torch.uint8"),
        (0, lambda c: c[0][0], "q_fp8.shape = [1, 8, 128]"),
        (0, lambda c: c[0][..., :96], "q_fp8.shape[-1] = 96: expected a power of two"),
        (1, lambda c: c[1].view(torch.int8), "kv_cache_fp8.dtype = torch.int8"),
        (1, lambda c: c[1][..., :100], "kv_cache_fp8.shape = [13, 4, 100]"),
        (1, lambda c: c[1].repeat(1, 2, 1, 1)[:, ::2], "kv_cache_fp8.stride() = "),
        (2, lambda c: c[2].half(), "weights.dtype = torch.float16"),
        (2, lambda c: c[2][:1], "weights.shape = [1, 8]: expected [2, 8]"),
        (3, lambda c: c[3].long(), "context_lens.dtype = torch.int64"),
        (3, lambda c: c[3][:1], "context_lens.shape = [1]: expected [2, 1]"),
        (4, lambda c: c[4][:1], "block_tables.shape = [1, 5]: expected [2, *]"),
        (6, lambda c: -1, "max_model_len = -1: expected at least 0"),
    ],
)
def test_bad_input_of_paged(index, spoil, message):
    case = list(paged_case([5, 9], 1, 8, 4, 20))
    case[index] = spoil(case)
    with pytest.raises(ValueError) as error:
        mqa_logits.fp8_paged_mqa_logits(*case)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda c: c[0].float(), "q.dtype = torch.float32"),
        (1, lambda c: c[1][:, :64], "kv.shape = [9, 64]: expected [*, 128]"),
        (2, lambda c: c[2][:3], "kv_scales.shape = [3]: expected [9]"),
        (3, lambda c: c[3].t(), "weights.shape = [4, 2]: expected [2, 4]"),
        (4, lambda c: c[4].long(), "cu_seqlen_ks.dtype = torch.int64"),
        (5, lambda c: c[5][:1], "cu_seqlen_ke.shape = [1]: expected [2]"),
    ],
)
def test_bad_input_of_flat(index, spoil, message):
    case = list(flat_case(2, 9, 4))
    case[index] = spoil(case)
    with pytest.raises(ValueError) as error:
        mqa_logits.fp8_mqa_logits(*case)
    assert message in str(error.value)
