# SPDX-License-Identifier: Apache-2.0
"""Prefill over ranges of gathered bf16 rows against float64."""

import pytest
import torch
from compare import assert_within
from fp8_operands import check_operands, of_call, poisoned, rotating
from fp8_pages import sparse_memory
from inputs import rotary_table
from loads import recording_loads

from kernels.reference import range_prefill as reference
from kernels.xpu_dsv4 import range_prefill as prefill
from kernels.xpu_dsv4.sparse_prefill import xpu_sparse_prefill
from kernels.xpu_dsv4.topk_indices import combine_topk_swa_indices

SCALE = 512**-0.5
ERROR = 2.0**-8
"""As of sparse prefill: of |o| + sum(p |v|)."""
interface = prefill.xpu_range_prefill


def batch(device, requests, heads=8, ratio=128, window=128, window_row=None, first=0):
    """Queries of `requests`, (tokens before, tokens now) each, and their rows.

    The rows that no query may see are NaN.
    """
    torch.manual_seed(heads + ratio + window)
    lens = [before + now for before, now in requests]
    gathered = [now + min(before, window - 1) for before, now in requests]
    if window_row is None:
        window_row = max(lens) // ratio + 3
    rows = window_row + max(gathered) + 2
    kv = torch.full((len(requests), rows, 512), float("nan"), dtype=torch.bfloat16)
    for request, (length, count) in enumerate(zip(lens, gathered, strict=True)):
        compressed = min(length // max(ratio, 1), window_row)
        kv[request, :compressed] = torch.randn(compressed, 512)
        kv[request, window_row : window_row + count] = torch.randn(count, 512)
    starts = torch.tensor([0] + [now for _, now in requests]).cumsum(0) + first
    tokens = int(starts[-1]) - first
    return {
        "q": torch.randn(tokens, heads, 512).bfloat16().to(device),
        "kv": kv.to(device),
        "query_start_loc": starts.int().to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "gather_lens": torch.tensor(gathered, dtype=torch.int32, device=device),
        "window_row": window_row,
        "window_size": window,
        "compress_ratio": ratio,
        "sm_scale": SCALE,
        "attn_sink": (torch.randn(heads) * 2).to(device),
    }


def check(arguments):
    actual = interface(**arguments)
    host = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name != "out"
    }
    magnitude = torch.empty(actual.shape, dtype=torch.float64)
    expected = reference.xpu_range_prefill(**host, magnitude=magnitude)
    assert_within(actual, expected, ERROR * (expected.abs() + magnitude))
    return actual.cpu()


CASES = {
    "start of a prompt": ([(0, 5)], {}),
    "compressed key of later queries": ([(126, 4)], {}),
    "compressed key of later queries, 16 heads": ([(126, 3)], {"heads": 16}),
    "other ratio and window": ([(1021, 5)], {"ratio": 4, "window": 16}),
    "many keys": ([(9000, 3)], {}),
    "ends inside a tile": ([(300, 3), (77, 0), (0, 1), (131, 4)], {"first": 7}),
    "no query": ([(300, 0), (5, 0)], {}),
    "5 heads": ([(200, 7)], {"heads": 5, "ratio": 8, "window": 9}),
    "1 head": ([(40, 35)], {"heads": 1, "ratio": 8, "window": 9}),
    "window alone": ([(400, 3), (0, 2)], {"window_row": 0, "ratio": 0}),
    "fewer compressed keys": ([(400, 3)], {"window_row": 2}),
    "window of one": ([(4, 3)], {"window": 1, "ratio": 2}),
}


@pytest.mark.parametrize(
    ("requests", "form"), [pytest.param(*case, id=name) for name, case in CASES.items()]
)
def test_shapes(requests, form, device):
    check(batch(device, requests, **form))


def test_many_requests_of_which_few_have_queries(device):
    """Also with none in the first half."""
    asked = {0: (3, 2), 126: (1, 0), 127: (0, 3), 128: (5, 1), 255: (2, 2), 299: (0, 1)}
    for first in (0, 126):
        requests = [(0, 0)] * (first and 130)
        requests += [asked.get(number, (0, 0)) for number in range(first, 300)]
        check(batch(device, requests, heads=8, window=4, ratio=2, window_row=3))


@pytest.mark.parametrize("ratio", [1, 128])
def test_equals_what_lists_of_indices_give(ratio, device):
    arguments = batch(
        device, [(500, 3), (126, 4)], ratio=ratio, window_row=0 if ratio == 1 else None
    )
    ranges = check(arguments)
    window_row, rows = arguments["window_row"], arguments["kv"].shape[1]
    chosen = torch.arange(max(window_row, 1), dtype=torch.int32, device=device)
    indices, lens = combine_topk_swa_indices(
        chosen.expand(len(ranges), -1).contiguous(),
        arguments["query_start_loc"],
        arguments["seq_lens"],
        arguments["gather_lens"],
        arguments["window_size"],
        ratio,
        window_row,
        rows,
        window_row,
    )
    by_index = xpu_sparse_prefill(
        arguments["q"],
        arguments["kv"].view(-1, 1, 512),
        indices,
        SCALE,
        arguments["attn_sink"],
        lens,
    ).cpu()
    assert bool(by_index.isfinite().all())
    bound = ERROR * (ranges.abs() + arguments["kv"].nan_to_num().abs().max().cpu())
    assert_within(by_index, ranges.double(), bound.double())


def test_keys_of_nan_stay_with_their_request(device):
    arguments = batch(device, [(300, 3), (131, 5), (7, 2)])
    before = interface(**arguments)
    arguments["kv"][1] = float("nan")
    after = interface(**arguments)
    assert bool(after[3:8].isnan().all())
    for others in (slice(3), slice(8, None)):
        assert torch.equal(after[others], before[others])


def test_no_window_begins_before_the_gathered_rows(device):
    arguments = batch(device, [(300, 4)])
    arguments["kv"][0, 5:26] = float("nan")
    arguments["gather_lens"] -= 21
    arguments["kv"][0, 5:115] = arguments["kv"][0, 26:136].clone()
    check(arguments)


def test_sinks_of_every_size(device):
    arguments = batch(device, [(126, 3)])
    sinks = [float("inf"), float("-inf"), 0.0, 80.0, -80.0, 3.0]
    arguments["attn_sink"][:6] = torch.tensor(sinks)
    out = check(arguments)
    assert not out[:, 0].any()
    arguments["attn_sink"] = None
    without = check(arguments)
    assert torch.equal(out[:, 1], without[:, 1])


def test_scores_that_rise_by_far(device):
    """The maximum is raised in later tiles of keys, and not in all rows."""
    arguments = batch(device, [(9000, 4)])
    arguments["kv"][:, 66:68] *= 30
    arguments["q"][1] *= 30
    check(arguments)


@pytest.mark.parametrize(("heads", "per_group"), [(8, 8), (16, 8), (5, 5)])
def test_fp8_is_what_a_second_launch_makes_of_bf16(heads, per_group, device):
    arguments = batch(device, [(126, 3), (0, 2)], heads)
    arguments["attn_sink"][:2] = torch.tensor([float("inf"), float("-inf")])
    attention = check(arguments)
    operands = poisoned(5, heads, per_group, device)
    out = of_call(operands)
    assert interface(**arguments, out=out) is out
    check_operands(operands, attention)


@pytest.mark.parametrize("other_types", [False, True])
def test_fp8_of_rotations_that_round(other_types, device):
    arguments = batch(device, [(126, 5)])
    attention = check(arguments)
    operands = poisoned(5, 8, 8, device, rotary_table)
    if other_types:
        operands = rotating(operands)
    interface(**arguments, out=of_call(operands))
    check_operands(operands, attention, exactly=False)


def test_a_score_of_nan_gives_nan(device):
    arguments = batch(device, [(126, 3)])
    expected = check(arguments)
    arguments["q"][1, 3, 5] = float("nan")
    actual = interface(**arguments).cpu()
    assert bool(actual[1, 3].isnan().all())
    actual[1, 3] = expected[1, 3]
    assert torch.equal(actual, expected)


def test_given_out_among_others(device):
    arguments = batch(device, [(126, 3)])
    expected = check(arguments)
    target = torch.full((5, 11, 600), 7.0, dtype=torch.bfloat16, device=device)
    out = target[1:-1, 2:-1, 8:520]
    assert interface(**arguments, out=out) is out
    assert torch.equal(out.cpu(), expected)
    out.fill_(7.0)
    assert bool((target == 7.0).all())


def test_rows_beyond_int32_addresses(device):
    arguments = batch(device, [(40, 2), (300, 2)])
    small = arguments["kv"]
    rows, window_row = 4_194_304 + 200, 4_194_304
    memory = sparse_memory(2 * rows * 1024 + 64, device)
    memory = memory[-memory.data_ptr() % 64 :][: 2 * rows * 1024]
    kv = memory.view(torch.bfloat16).view(2, rows, 512)
    kv[:, :2] = small[:, :2]
    kv[:, window_row : window_row + 129] = small[:, 5 : 5 + 129]
    expected = check(arguments)
    arguments["kv"], arguments["window_row"] = kv, window_row
    assert torch.equal(interface(**arguments).cpu(), expected)


def test_a_tile_loads_each_key_once(device):
    """As a key and as a value: 2 queries of 8 heads share a tile."""
    if device.type != "cpu":
        pytest.skip("loads are counted by the interpreter, which runs on a CPU only")
    arguments = batch(device, [(300, 2)])
    with recording_loads() as loads:
        interface(**arguments)
    times = loads.within(arguments["kv"])
    seen = [0, 1, *range(5, 5 + 129)]
    assert sorted({byte // 1024 for byte in times}) == seen
    assert set(times.values()) == {2}


def test_no_tokens(device):
    arguments = batch(device, [(4, 2)])
    arguments["q"] = arguments["q"][:0]
    assert interface(**arguments).shape == (0, 8, 512)


@pytest.mark.parametrize(
    ("heads", "change", "taken"),
    [
        (8, lambda q: q, True),
        (16, lambda q: q[1:], True),
        (17, lambda q: q, False),
        (8, lambda q: q[:, :6], False),
        (8, lambda q: q.mT.contiguous().mT, False),
    ],
)
def test_which_queries_are_taken(heads, change, taken, device):
    q = torch.empty(3, heads, 512, dtype=torch.bfloat16, device=device)
    kv = torch.empty(2, 9, 512, dtype=torch.bfloat16, device=device)
    assert prefill.takes_ranges(change(q), kv) is taken
    assert not prefill.takes_ranges(change(q), kv[:, 1:])


def _change(name, change):
    return lambda arguments: arguments.update({name: change(arguments.get(name))})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q.dtype", _change("q", lambda x: x.float())),
        ("q.shape", _change("q", lambda x: x[..., :448])),
        ("q, kv", _change("q", lambda x: x[:, :4])),
        ("q, kv", _change("q", lambda x: x.repeat(1, 3, 1))),
        ("kv.dtype", _change("kv", lambda x: x.half())),
        ("kv.shape", _change("kv", lambda x: x[0])),
        ("q, kv", _change("kv", lambda x: x[:, 1:])),
        ("query_start_loc.shape", _change("query_start_loc", lambda x: x[1:])),
        ("seq_lens.dtype", _change("seq_lens", lambda x: x.long())),
        ("gather_lens.shape", _change("gather_lens", lambda x: x[:1])),
        ("window_row", _change("window_row", lambda x: 10**6)),
        ("window_row", _change("window_row", lambda x: -1)),
        ("window_size", _change("window_size", lambda x: 0)),
        ("compress_ratio", _change("compress_ratio", lambda x: -1)),
        ("attn_sink.shape", _change("attn_sink", lambda x: x[:2])),
        ("out.shape", _change("out", lambda _: torch.empty(2, 3, 448).bfloat16())),
        ("kv.device", _change("kv", lambda x: x.to("meta"))),
    ],
)
def test_bad_arguments(name, change, device):
    arguments = batch(device, [(300, 3), (0, 2)])
    change(arguments)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        interface(**arguments)
