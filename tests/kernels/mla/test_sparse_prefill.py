# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill over gathered bf16 keys against float64."""

import pytest
import torch
from compare import assert_within
from fp8_operands import check_operands, of_call, poisoned, rotating
from fp8_pages import sparse_memory
from inputs import rotary_table
from loads import recording_loads

from kernels.reference.mla import sparse_prefill as reference
from kernels.xpu_dsv4.mla import sparse_prefill as prefill

SCALE = 512**-0.5
ERROR = 2.0**-8
"""Of rounding probabilities and the result to bf16, twice over: the bound of an element
is this times |o| + sum(p |v|)."""
interface = prefill.xpu_sparse_prefill


def batch(tokens, heads, topk, rows, device):
    torch.manual_seed(tokens + heads + topk)
    return {
        "q": torch.randn(tokens, heads, 512).bfloat16().to(device),
        "kv": torch.randn(rows, 1, 512).bfloat16().to(device),
        "indices": torch.randint(0, rows, (tokens, 1, topk), dtype=torch.int32).to(
            device
        ),
        "sm_scale": SCALE,
        "attn_sink": (torch.randn(heads) * 2).to(device),
        "topk_length": torch.full((tokens,), topk, dtype=torch.int32, device=device),
    }


def check(arguments):
    actual = interface(**arguments)
    host = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name != "out"
    }
    magnitude = torch.empty(actual.shape, dtype=torch.float64)
    expected = reference.xpu_sparse_prefill(**host, magnitude=magnitude)
    assert_within(actual, expected, ERROR * (expected.abs() + magnitude))
    return actual.cpu()


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "rows"),
    [
        pytest.param(*case, id="T{}-H{}-K{}-R{}".format(*case))
        for case in [
            (2, 16, 70, 300),
            (1, 64, 640, 900),
            (1, 128, 130, 77),
            (3, 5, 63, 100),
            (1, 33, 17, 5),
            (2, 70, 111, 300),
            (2, 1, 1, 1),
            (2, 12, 33, 50),
        ]
    ],
)
def test_shapes(tokens, heads, topk, rows, device):
    check(batch(tokens, heads, topk, rows, device))


few_and_many_heads = pytest.mark.parametrize("heads", [6, 12, 64])
"""Each has a form of the kernel of its own on XPU, and the first and last on CUDA."""


@few_and_many_heads
def test_hard_indices_and_lonely_queries(heads, device):
    arguments = batch(6, heads, 70, 90, device)
    hard = [-1, -2, -(2**31), 2**31 - 1, 90, 91, 0, 89]
    indices = arguments["indices"]
    indices[0, 0, : len(hard)] = torch.tensor(hard, dtype=torch.int32)
    indices[1] = -1
    indices[2, 0, :65] = 2**31 - 1
    arguments["topk_length"].copy_(torch.tensor([70, 70, 70, 0, 1, 69]))
    out = check(arguments)
    for lonely in (1, 3):
        assert not out[lonely].any()


@few_and_many_heads
def test_lengths_are_clamped_and_may_be_absent(heads, device):
    arguments = batch(3, heads, 20, 90, device)
    full = check(arguments)
    arguments["topk_length"].copy_(torch.tensor([2**31 - 1, 21, -4]))
    clamped = interface(**arguments).cpu()
    assert torch.equal(clamped[:2], full[:2])
    assert not clamped[2].any()
    arguments["topk_length"] = torch.tensor([2**32, 2**40 + 3, -(2**32) + 5]).to(device)
    assert torch.equal(interface(**arguments).cpu(), clamped)
    arguments["topk_length"] = None
    assert torch.equal(check(arguments), full)


@few_and_many_heads
def test_sinks_of_every_size(heads, device):
    arguments = batch(2, heads, 20, 90, device)
    sinks = [float("inf"), float("-inf"), 0.0, 80.0, -80.0, 3.0]
    arguments["attn_sink"][:6] = torch.tensor(sinks)
    out = check(arguments)
    assert not out[:, 0].any()
    arguments["attn_sink"] = None
    without = check(arguments)
    assert torch.equal(out[:, 1], without[:, 1])


def far_batch(heads, device):
    """Scores near 0, at the edge of 64 powers of 2, and far above and below it; of the
    last token above for some keys and below for others."""
    arguments = batch(4, heads, 70, 90, device)
    torch.manual_seed(7)
    way = torch.randn(512)
    kv = way + 0.3 * torch.randn(90, 1, 512)
    kv[:, :, :448] *= 1.5
    kv[::2, :, :448] *= 0.5
    factors = torch.tensor([0.1, 2.0, -2.0, 9.0, -9.0, 0.0])
    factors = factors.repeat(-(-heads // 6))[:heads]
    q = way * factors[:, None] + 0.1 * torch.randn(4, heads, 512)
    arguments["kv"].copy_(kv.bfloat16())
    arguments["q"].copy_(q.bfloat16())
    arguments["kv"][45:] *= (
        torch.tensor([1.0, -1.0]).bfloat16().repeat(45)[:45, None, None].to(device)
    )
    arguments["indices"][:3].remainder_(45)
    arguments["indices"][1, 0, 3:9] = torch.tensor(
        [-1, 90, 91, 2**31 - 1, -(2**31), -1]
    )
    arguments["topk_length"].copy_(torch.tensor([70, 41, 0, 70]))
    return arguments


@few_and_many_heads
@pytest.mark.parametrize(
    "sink", [None, 0.0, 300.0, -300.0, float("inf"), float("-inf")]
)
def test_scores_far_from_0(sink, heads, device):
    arguments = far_batch(heads, device)
    if sink is None:
        arguments["attn_sink"] = None
    else:
        arguments["attn_sink"].fill_(sink)
    out = check(arguments)
    assert bool(out.isfinite().all()) and not out[2].any()


@pytest.mark.parametrize("heads", [6, 12])
def test_a_far_score_changes_no_other_head(heads, device):
    """XPU's forms for few heads take a maximum off those alone that need it."""
    arguments = batch(2, heads, 70, 90, device)
    expected = check(arguments)
    arguments["q"][1, 3] *= 100
    actual = check(arguments)
    assert not torch.equal(actual[1, 3], expected[1, 3])
    actual[1, 3] = expected[1, 3]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("heads", [8, 16])
def test_keys_are_read_again_only_where_scores_are_far(heads, device):
    if device.type != "cpu":
        pytest.skip("loads are counted by the interpreter, which runs on a CPU only")
    arguments = batch(2, heads, 64, 90, device)
    arguments["indices"].copy_(torch.arange(64, dtype=torch.int32) + 5)
    arguments["indices"][1] += 10
    arguments["kv"][70:] *= 100
    arguments["q"][:, 3] = arguments["kv"][74, 0] / 100
    with recording_loads() as loads:
        interface(**arguments)
    reads = {offset // 1024: n for offset, n in loads.within(arguments["kv"]).items()}
    # The first token has keys 5 to 68, the second one 15 to 78, with five far ones.
    assert {reads[5], reads[14]} == {1}
    assert {reads[15], reads[68]} == {3}
    assert {reads[69], reads[78]} == {2}


@pytest.mark.parametrize(
    ("heads", "per_group"), [(64, 8), (5, 5), (33, 11), (2, 1), (12, 4)]
)
def test_fp8_is_what_a_second_launch_makes_of_bf16(heads, per_group, device):
    arguments = batch(3, heads, 20, 90, device)
    arguments["topk_length"].copy_(torch.tensor([20, 0, 3]))
    arguments["attn_sink"][:2] = torch.tensor([float("inf"), float("-inf")])
    attention = check(arguments)
    operands = poisoned(3, heads, per_group, device)
    out = of_call(operands)
    assert interface(**arguments, out=out) is out
    check_operands(operands, attention)


@few_and_many_heads
@pytest.mark.parametrize("other_types", [False, True])
def test_fp8_of_rotations_that_round(other_types, heads, device):
    arguments = batch(5, heads, 20, 90, device)
    attention = check(arguments)
    operands = poisoned(5, heads, heads, device, rotary_table)
    if other_types:
        operands = rotating(operands)
    interface(**arguments, out=of_call(operands))
    check_operands(operands, attention, exactly=False)


@few_and_many_heads
@pytest.mark.parametrize("in_fp8", [False, True])
def test_replay_of_a_graph_with_other_inputs(in_fp8, heads, device):
    if device.type != "cuda":
        pytest.skip("graphs are captured on a GPU only")
    arguments = batch(4, heads, 20, 90, device)
    operands = poisoned(4, heads, heads, device)
    out = of_call(operands) if in_fp8 else torch.empty_like(arguments["q"])
    interface(**arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        interface(**arguments, out=out)
    torch.manual_seed(1)
    for name in ("q", "kv"):
        arguments[name].copy_(torch.randn(arguments[name].shape))
    arguments["topk_length"].copy_(torch.tensor([20, 0, 3, 17]))
    operands.positions.copy_(operands.positions.flip(0))
    graph.replay()
    attention = check(arguments)
    if in_fp8:
        check_operands(operands, attention)
    else:
        assert torch.equal(out.cpu(), attention)


@few_and_many_heads
def test_a_score_of_nan_gives_nan(heads, device):
    arguments = batch(2, heads, 40, 90, device)
    expected = check(arguments)
    arguments["q"][1, 3, 5] = float("nan")
    actual = interface(**arguments).cpu()
    assert bool(actual[1, 3].isnan().all())
    actual[1, 3] = expected[1, 3]
    assert torch.equal(actual, expected)


@few_and_many_heads
def test_queries_with_gaps_over_packed_keys(heads, device):
    """XPU's forms for few heads take no keys with gaps, as those of the test below."""
    arguments = batch(3, heads, 20, 90, device)
    expected = check(arguments)
    nan = float("nan")
    q = torch.full((3, heads + 2, 512), nan, dtype=torch.bfloat16, device=device)
    q[:, 1:-1] = arguments["q"]
    target = torch.full((3, heads + 3, 600), 7.0, dtype=torch.bfloat16, device=device)
    arguments["q"], arguments["out"] = q[:, 1:-1], target[:, 2:-1, 8:520]
    assert torch.equal(interface(**arguments).cpu(), expected)
    arguments["out"].fill_(7.0)
    assert bool((target == 7.0).all())


@few_and_many_heads
def test_strided_tensors_and_given_out(heads, device):
    arguments = batch(3, heads, 20, 90, device)
    expected = check(arguments)
    nan = float("nan")
    target = torch.full((3, heads + 3, 600), 7.0, dtype=torch.bfloat16, device=device)
    arguments["out"] = target[:, 2:-1, 8:520]
    assert torch.equal(interface(**arguments).cpu(), expected)
    target.fill_(7.0)
    q = torch.full((3, heads + 2, 520), nan, dtype=torch.bfloat16, device=device)
    q[:, 1:-1, 8:] = arguments["q"]
    kv = torch.full((90, 1, 600), float("nan"), dtype=torch.bfloat16, device=device)
    kv[..., 16:528] = arguments["kv"]
    arguments["q"], arguments["kv"] = q[:, 1:-1, 8:], kv[..., 16:528]
    arguments["indices"] = arguments["indices"].long().squeeze(1)
    out = interface(**arguments)
    assert out.data_ptr() == arguments["out"].data_ptr()
    actual = check(arguments)
    # The forms for few heads take neither these queries nor these keys.
    if heads == 64:
        assert torch.equal(actual, expected)
    target[:, 2:-1, 8:520] = 7.0
    assert bool((target == 7.0).all())


@few_and_many_heads
def test_rows_of_other_tokens_do_not_matter(heads, device):
    arguments = batch(3, heads, 70, 90, device)
    indices = arguments["indices"]
    indices.remainder_(40).add_(20)
    indices[0, 0, 1:] = -1
    indices[1, 0, ::2] = 90
    expected = check(arguments)
    arguments["kv"][:20] = float("nan")
    arguments["kv"][60:] = float("nan")
    assert torch.equal(interface(**arguments).cpu(), expected)


@few_and_many_heads
def test_wide_indices_are_not_cut_to_32_bits(heads, device):
    """-2**40 has a 0 in its lower half, and 2**32 + 1 a 1: neither is a row."""
    arguments = batch(2, heads, 5, 9, device)
    arguments["indices"] = arguments["indices"].long()
    arguments["indices"][0] = torch.tensor([-(2**40), 2**32 + 1, -1, 9, 2**40])
    arguments["kv"][:2] = float("nan")
    arguments["indices"][1].remainder_(7).add_(2)
    check(arguments)


def test_rows_beyond_int32_addresses(device):
    rows = 4_194_304 + 9
    kv = sparse_memory(rows * 1024, device).view(torch.bfloat16).view(rows, 1, 512)
    arguments = batch(1, 3, 4, 4, device)
    chosen = [rows - 1, 4_194_304, 2_100_000, 3]
    kv[chosen] = arguments["kv"]
    arguments["kv"] = kv
    arguments["indices"] = torch.tensor([[chosen]], dtype=torch.int32, device=device)
    check(arguments)


def test_nothing_is_read_past_the_length(device):
    """Early exit: indices and keys beyond `topk_length` are not visited."""
    if device.type != "cpu":
        pytest.skip("loads are counted by the interpreter, which runs on a CPU only")
    arguments = batch(1, 3, 300, 90, device)
    arguments["indices"][0, 0, 5:] = 80
    arguments["indices"][0, 0, :5] = torch.arange(5, dtype=torch.int32)
    arguments["topk_length"][0] = 5
    with recording_loads() as loads:
        interface(**arguments)
    assert max(loads.within(arguments["indices"])) < 5 * 4
    assert max(loads.within(arguments["kv"])) < 5 * 1024


def test_no_tokens(device):
    arguments = batch(1, 4, 3, 3, device)
    for name in ("q", "indices", "topk_length"):
        arguments[name] = arguments[name][:0]
    assert interface(**arguments).shape == (0, 4, 512)


def _change(name, change):
    return lambda arguments: arguments.update({name: change(arguments.get(name))})


@pytest.mark.parametrize(
    ("names", "change"),
    [
        ("q.dtype", _change("q", lambda x: x.float())),
        ("q.shape", _change("q", lambda x: x[..., :448])),
        ("q.stride", _change("q", lambda x: x.mT.contiguous().mT)),
        ("kv.dtype", _change("kv", lambda x: x.half())),
        ("kv.shape", _change("kv", lambda x: x.repeat(1, 2, 1))),
        ("indices.dtype", _change("indices", lambda x: x.float())),
        ("indices.shape", _change("indices", lambda x: x[:1])),
        ("attn_sink.shape", _change("attn_sink", lambda x: x[:2])),
        ("topk_length.shape", _change("topk_length", lambda x: x[:1])),
        ("out.shape", _change("out", lambda _: torch.empty(2, 3, 448).bfloat16())),
        ("kv.device", _change("kv", lambda x: x.to("meta"))),
    ],
)
def test_bad_arguments(names, change, device):
    arguments = batch(2, 3, 4, 4, device)
    change(arguments)
    with pytest.raises(ValueError, match=names.replace(".", r"\.")):
        interface(**arguments)
