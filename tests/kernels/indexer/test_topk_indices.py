# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic: every value equals the reference's."""

import pytest
import torch

from kernels.reference.indexer import topk_indices as reference
from kernels.xpu_dsv4.indexer import topk_indices

INT_MAX = 2**31 - 1


def global_both(arguments):
    mine = topk_indices.compute_global_topk_indices_and_lens(*arguments)
    cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    want = reference.compute_global_topk_indices_and_lens(*cpu)
    for a, b in zip(mine, want, strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a.cpu(), b)
    return mine


@pytest.mark.parametrize("block_size", [64, 256, 2, 7])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 16), (5, 63), (3, 600), (9, 1)])
def test_global(tokens, topk, block_size, device):
    torch.manual_seed(topk)
    requests, width = 4, 11
    index = torch.randint(-3, width * block_size + 5, (tokens, topk)).int()
    index[0, 0], index[-1, -1] = INT_MAX, -(2**31)
    table = torch.randint(-1, 1000, (requests, width)).int()
    request = torch.randint(0, requests, (tokens,)).int()
    valid = torch.rand(tokens) < 0.8
    arguments = [x.to(device) for x in (index, request, table, valid)]
    arguments.insert(3, block_size)
    global_both(arguments)


def test_global_out_of_range_requests_and_strides(device):
    torch.manual_seed(1)
    index = torch.randint(0, 20, (6, 40), device=device).int()[:, 3:20]
    table = torch.randint(0, 99, (3, 12), device=device).int()[:2, 2:9]
    request = torch.tensor([0, 1, 2, -1, INT_MAX, 1], device=device)
    valid = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.uint8, device=device)
    slots, lens = global_both([index, request.int(), table, 3, valid])
    assert (slots[2:] == -1).all() and not lens[2:].any()


def test_global_does_not_read_behind_the_table(device):
    """Entries behind a row belong to the next request and must not be used."""
    table = torch.arange(12, device=device).int().view(3, 4)[:, :2]
    index = torch.tensor([[0, 7, 8, 9, 15]], device=device).int()
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    slots, lens = global_both([index, zero, table, 4, torch.ones_like(zero).bool()])
    assert slots.tolist() == [[0, 7, -1, -1, -1]] and lens.tolist() == [2]


def test_global_into_given_tensors(device):
    table = torch.arange(8, device=device).int().view(2, 4)
    index = torch.tensor([[3, -1], [9, 5]], device=device).int()
    request = torch.tensor([0, 1], device=device).int()
    arguments = [index, request, table, 4, torch.ones(2, device=device).bool()]
    out = torch.empty(2, 3, device=device).int()[:, :2], request.new_empty(2)
    given = topk_indices.compute_global_topk_indices_and_lens(*arguments, out=out)
    assert given[0] is out[0] and given[1] is out[1]
    for a, b in zip(out, global_both(arguments), strict=True):
        assert torch.equal(a, b)


def combine_both(arguments, device, out=None, images=(None, None, 0)):
    moved = [
        x.to(device) if isinstance(x, torch.Tensor) else x
        for x in (*arguments, out, *images)
    ]
    mine = topk_indices.combine_topk_swa_indices(*moved)
    want = reference.combine_topk_swa_indices(*arguments, None, *images)
    for a, b in zip(mine, want, strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a.cpu(), b)
    return mine


def combine_case(query_lens, past, topk, window, ratio, offset=0):
    query_lens, past = torch.tensor(query_lens), torch.tensor(past)
    seq_lens = query_lens + past
    start = torch.cat((torch.zeros(1).long(), query_lens.cumsum(0))) + offset
    gather = torch.minimum(seq_lens, query_lens + window - 1)
    rows = max(1, int(seq_lens.max()) // ratio)
    tokens = int(query_lens.sum())
    index = torch.randint(0, rows, (tokens, max(topk, 1))).int()
    return (
        index,
        start.int(),
        seq_lens.int(),
        gather.int(),
        window,
        ratio,
        topk,
        rows + int(gather.max()),
        rows,
    )


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(
    ("query_lens", "past"),
    [
        ([1], [0]),
        ([63], [111]),
        ([5, 1, 30], [0, 300, 7]),
        ([0, 9, 0, 4], [5, 130, 1, 0]),
    ],
)
def test_combine(query_lens, past, ratio, device):
    torch.manual_seed(len(query_lens))
    for topk, window in ((16, 128), (0, 128), (37, 5), (130, 128)):
        combine_both(combine_case(query_lens, past, topk, window, ratio), device)


def test_combine_of_a_chunk(device):
    """A chunk's query_start_loc does not begin at zero."""
    torch.manual_seed(3)
    combine_both(combine_case([5, 8], [9, 200], 16, 128, 4, offset=1000), device)


def test_combine_keeps_missing_choices(device):
    case = combine_case([6], [50], 16, 8, 4)
    case[0][2] = -1
    case[0][3, 5] = -1
    indices, _ = combine_both(case, device)
    assert (indices[2, :13] == -1).all() and indices[3, 5] == -1


def test_combine_padding_tokens_and_narrow_choices(device):
    index, *rest = combine_case([6, 3], [50, 900], 16, 8, 4)
    padded = torch.cat((index, index[:4]))[:, :11]
    _, lens = combine_both((padded, *rest), device)
    assert not lens[9:].any()


def test_combine_into_given_tensors(device):
    case = combine_case([6, 3], [50, 900], 16, 8, 4)
    wide = torch.full((9, 200), 5, dtype=torch.int32, device=device)
    lens = torch.full((9,), 5, dtype=torch.int32, device=device)
    mine = combine_both(case, device, out=(wide[:, :128], lens))
    assert mine[0].data_ptr() == wide.data_ptr() and mine[1] is lens
    assert (wide[:, 128:] == 5).all()


def image_case():
    """Two requests; tokens 3 to 22 of the second are an image of 20 tokens."""
    case = combine_case([4, 30], [9, 2], 16, 8, 4)
    left, right = torch.zeros(34).int(), torch.zeros(34).int()
    left[7:27], right[7:27] = torch.arange(20).int(), torch.arange(19, -1, -1).int()
    return case, left, right


def test_combine_shows_an_image_its_whole_self(device):
    torch.manual_seed(5)
    case, left, right = image_case()
    indices, lens = combine_both(case, device, images=(left, right, 20))
    plain, plain_lens = combine_both(case, device)
    assert torch.equal(lens[:7], plain_lens[:7])
    assert torch.equal(indices[:7, :128], plain[:7])
    first, image = case[7] + case[8], range(5, 25)
    for token in range(7, 27):
        choices = min((2 + token - 4 + 1) // 4, 16)
        raw = indices[token, choices : int(lens[token])].tolist()
        assert {first + position for position in image} <= set(raw)


def test_combine_widens_for_images_in_batches_without(device):
    case, *_ = image_case()
    indices, _ = combine_both(case, device, images=(None, None, 200))
    assert indices.shape[1] == 256


def test_combine_keeps_the_newest_of_an_image_too_wide(device):
    case, left, right = image_case()
    left[20] = 4000
    indices, lens = combine_both(case, device, images=(left, right + 130, 0))
    assert lens.max() == indices.shape[1] == 128


def test_combine_wants_both_sides_of_an_image():
    case, left, _ = image_case()
    with pytest.raises(ValueError, match="right_visible = None"):
        topk_indices.combine_topk_swa_indices(*case, left_visible=left)
    with pytest.raises(ValueError, match=r"left_visible.shape = \[3\]"):
        topk_indices.combine_topk_swa_indices(
            *case, left_visible=left[:3], right_visible=left
        )
    with pytest.raises(ValueError, match="max_image_tokens = -1"):
        topk_indices.combine_topk_swa_indices(*case, max_image_tokens=-1)


def test_combine_many_requests(device):
    torch.manual_seed(4)
    lens = torch.randint(0, 2, (300,)).tolist()
    combine_both(combine_case(lens, [7] * 300, 4, 8, 4), device)


def test_property_based(device):
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is optional")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(
        requests=st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=4
        ),
        topk=st.integers(0, 20),
        window=st.integers(1, 130),
        ratio=st.sampled_from([1, 4, 128]),
    )
    def check(requests, topk, window, ratio):
        query_lens, past = zip(*requests, strict=True)
        combine_both(combine_case(query_lens, past, topk, window, ratio), device)

    check()


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(9, 16), "topk_indices.dtype = torch.float32"),
        (1, torch.zeros(2).int(), "query_start_loc.shape = [2]: expected [3]"),
        (2, torch.zeros(2).long(), "seq_lens.dtype = torch.int64"),
        (3, torch.zeros(3).int(), "gather_lens.shape = [3]: expected [2]"),
        (4, -1, "window_size = -1: expected at least 0"),
        (5, 0, "compress_ratio = 0: expected at least 1"),
        (6, -2, "topk = -2: expected at least 0"),
    ],
)
def test_bad_input_of_combine(index, value, message):
    case = list(combine_case([6, 3], [50, 900], 16, 8, 4))
    case[index] = value
    with pytest.raises(ValueError) as error:
        topk_indices.combine_topk_swa_indices(*case)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3, 4), "topk_indices.dtype = torch.float32"),
        (0, torch.zeros(4).int(), "topk_indices.shape = [4]"),
        (1, torch.zeros(2).int(), "token_to_req_indices.shape = [2]: expected [3]"),
        (2, torch.zeros(2, 2).long(), "block_table.dtype = torch.int64"),
        (3, 0, "block_size = 0: expected at least 1"),
        (4, torch.zeros(3), "is_valid_token.dtype = torch.float32"),
    ],
)
def test_bad_input_of_global(index, value, message):
    zeros = torch.zeros(3).int()
    case = [torch.zeros(3, 4).int(), zeros, torch.zeros(2, 2).int(), 4, zeros.bool()]
    case[index] = value
    with pytest.raises(ValueError) as error:
        topk_indices.compute_global_topk_indices_and_lens(*case)
    assert message in str(error.value)


@pytest.mark.parametrize("which", [0, 1])
def test_given_tensors_of_another_device(which):
    zeros = torch.zeros(3).int()
    case = [torch.zeros(3, 4).int(), zeros, torch.zeros(2, 2).int(), 4, zeros.bool()]
    out = [torch.zeros(3, 4).int(), torch.zeros(3).int()]
    out[which] = out[which].to("meta")
    with pytest.raises(ValueError, match=rf"out\[{which}\]\.device = meta"):
        topk_indices.compute_global_topk_indices_and_lens(*case, tuple(out))
