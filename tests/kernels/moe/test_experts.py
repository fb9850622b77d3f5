# SPDX-License-Identifier: Apache-2.0
"""Routed experts against float64, in each format of weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from compare import assert_close
from expert_calls import Call, on
from expert_calls import make as make_call

from kernels.reference.moe import experts as reference
from kernels.xpu_dsv4.moe import _experts_config, experts
from kernels.xpu_dsv4.moe._experts_route import num_tiles

Make = Callable[..., Call]


@pytest.fixture(params=["mxfp4", "fp8", "int4"])
def make(request: pytest.FixtureRequest) -> Make:
    """A call with weights of each format."""
    return partial(make_call, form=request.param)


def run(call: Call, device: torch.device, **options: object) -> torch.Tensor:
    result = experts.routed_experts(
        *on(call, device),
        swiglu_limit=call.limit,
        scale_block=call.form.scale_block,
        **options,
    )
    assert result.dtype == torch.bfloat16
    return result.cpu()


def expected(call: Call) -> torch.Tensor:
    return reference.routed_experts(
        call.x,
        call.w13,
        call.w13_scale,
        call.w2,
        call.w2_scale,
        call.weights,
        call.ids,
        call.expert_map,
        call.limit,
        call.form.scale_block,
    )


def nan_of(scale: torch.Tensor) -> float:
    return 255 if scale.dtype == torch.uint8 else torch.nan


def compare(call: Call, device: torch.device) -> torch.Tensor:
    mine, want = run(call, device), expected(call)
    finite = want[want.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    bounds = {"absolute": 2**-6 * largest, "relative": 6e-3}
    if call.w13.dtype == torch.float8_e4m3fn:
        # Tiles of many rows round a weight times its fp32 scale to bf16.
        bounds["cosine"] = 2e-5
    assert_close(mine, want, name="rows", **bounds)
    return mine


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "hidden", "intermediate"),
    [
        (1, 1, 4, 32, 32),
        (1, 6, 8, 64, 32),
        (3, 2, 5, 96, 64),
        (7, 3, 4, 64, 96),
        (16, 2, 4, 64, 32),
        (17, 3, 2, 32, 32),
        (50, 1, 2, 32, 32),
        (70, 1, 2, 64, 32),
    ],
)
def test_shapes(make, tokens, topk, count, hidden, intermediate, device):
    compare(make(tokens, min(topk, count), count, hidden, intermediate), device)


@pytest.mark.parametrize(("tokens", "topk"), [(2, 2), (12, 3)])
def test_forms_give_equal_bits(make, tokens, topk, device, monkeypatch):
    """Who loads ahead and how codes are unpacked changes no bit, nor what a scale of 0
    or NaN gives."""
    call = make(tokens, topk, 4, 96, 64)
    w13_scale, w2_scale = call.w13_scale.clone(), call.w2_scale.clone()
    w13_scale[:, 3, 1] = 0
    w2_scale[2, 1, 0] = nan_of(w2_scale)
    call = replace(call, w13_scale=w13_scale, w2_scale=w2_scale)
    shared, results = _experts_config.product, []
    for ahead, paired in product((True, False), repeat=2):
        form = {"ahead": ahead, "paired": paired, "stages": 1 if ahead else 3}
        monkeypatch.setattr(
            _experts_config, "product", lambda *a, f=form: replace(shared(*a), **f)
        )
        results.append(compare(call, device).nan_to_num(2.0**100))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("intermediate", [192, 288])
def test_a_slice_that_is_no_power_of_two(make, intermediate, device):
    compare(make(2, 2, 3, 128, intermediate), device)


@pytest.mark.parametrize("rows", [7, 8, 9, 15, 16, 17])
def test_all_tokens_to_one_expert(make, rows, device):
    call = make(rows, 1, 40, 32, 32)
    compare(replace(call, ids=torch.full((rows, 1), 3, dtype=torch.int32)), device)


@pytest.mark.parametrize("form", ["few", "many"])
def test_ids_that_are_not_here(make, form, device):
    """-1, past the end, and the ends of the type: those pairs add nothing."""
    call = make(9 if form == "few" else 40, 4, 12)
    ids = call.ids.clone()
    ids[1:5, 0] = torch.tensor([-1, 12, 2**31 - 1, -(2**31)])
    ids[7] = -1
    mine = compare(replace(call, ids=ids), device)
    assert not mine[7].any()


def test_int64_ids_beyond_int32(make, device):
    call = make(5, 2, 4)
    ids = call.ids.long()
    ids[:2, 0] = torch.tensor([2**32 + 1, -(2**40)])
    compare(replace(call, ids=ids), device)


@pytest.mark.parametrize("tokens", [4, 30])
def test_experts_of_another_rank(make, tokens, device):
    call = make(tokens, 3, 4)
    ids = torch.stack([torch.randperm(12)[:3] for _ in range(tokens)]).int()
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[torch.tensor([2, 9, 5, 11])] = torch.arange(4, dtype=torch.int32)
    compare(replace(call, ids=ids, expert_map=expert_map), device)


def test_a_rank_without_a_token(make, device):
    call = make(6, 2, 4)
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[4:] = torch.arange(4, dtype=torch.int32)
    mine = compare(replace(call, expert_map=expert_map), device)
    assert not mine.any()


@pytest.mark.parametrize("tokens", [5, 33])
def test_an_expert_chosen_twice_counts_twice(make, tokens, device):
    call = make(tokens, 4, 4)
    ids = call.ids.clone()
    ids[:, 2] = ids[:, 0]
    compare(replace(call, ids=ids), device)


def test_no_token(make, device):
    assert run(make(1, 2, 4), device).shape == (1, 64)
    call = make(1, 2, 4)
    none = replace(call, x=call.x[:0], weights=call.weights[:0], ids=call.ids[:0])
    assert run(none, device).shape == (0, 64)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_limit(make, limit, device):
    call = make(5, 2, 4)
    mine = compare(replace(call, limit=limit), device)
    assert not torch.equal(mine, run(call, device)) or limit is None


def test_every_code_under_every_scale(device):
    """One expert, one code of one block at a time: the product is exact."""
    call = make_call(1, 1, 1, 32, 32)
    w2 = torch.zeros_like(call.w2)
    codes = torch.arange(16, dtype=torch.uint8)
    w2[0, :16, 0] = codes
    w2[0, 16:, 8] = codes << 4
    w13 = torch.zeros_like(call.w13)
    w13[0, :, 0] = 2
    for exponent in (0, 1, 2, 100, 127, 128, 129, 200, 254):
        scale = torch.full_like(call.w2_scale, exponent)
        unit = torch.full_like(call.w13_scale, 127)
        made = replace(call, w13=w13, w13_scale=unit, w2=w2, w2_scale=scale)
        mine = of_ones(made, device)[0]
        grid = reference.mxfp4_values(w2[0], scale[0]).sum(1) * ACTIVATED
        want = grid.bfloat16().double()
        tiny = grid.abs() < 2.0**-120
        assert torch.equal(mine[~tiny], want[~tiny]), exponent
        assert (mine[tiny].abs() < 2.0**-119).all()


ACTIVATED = float(torch.nn.functional.silu(torch.tensor(1.0)).bfloat16())
"""What a gate and another half of 1 give."""


def of_ones(call: Call, device: torch.device) -> torch.Tensor:
    """Results where each token's first value is 1, the others 0."""
    x = torch.zeros_like(call.x)
    x[:, 0] = 1.0
    made = replace(call, x=x, weights=torch.ones_like(call.weights))
    return run(made, device).double()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("power", [-20, 0, 9])
def test_every_code_of_fp8(tokens, power, device):
    """Of few and of many rows, at two places of a block; also subnormal codes."""
    call = make_call(tokens, 1, 1, 512, 32, form="fp8")
    w13 = torch.zeros(call.w13.shape, dtype=torch.uint8)
    w2 = torch.zeros(call.w2.shape, dtype=torch.uint8)
    w13[0, :, 0] = 0x38
    w2[0, :256, 0] = w2[0, 256:, 29] = torch.arange(256, dtype=torch.uint8)
    w2[w2 % 128 == 127] = 0
    made = replace(
        call,
        w13=w13.view(torch.float8_e4m3fn),
        w13_scale=torch.ones_like(call.w13_scale),
        w2=w2.view(torch.float8_e4m3fn),
        w2_scale=torch.full_like(call.w2_scale, 2.0**power),
    )
    want = made.w2[0].double().sum(1) * ACTIVATED * 2.0**power
    for row in of_ones(made, device):
        assert torch.equal(row, want.bfloat16().double())


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("power", [-20, 0, 100])
def test_every_code_of_int4(tokens, power, device):
    """Of few and of many rows, at each place of a word."""
    call = make_call(tokens, 1, 1, 512, 32, form="int4")
    w13 = torch.full_like(call.w13, 0x88)
    w13[0, :, 0] = 0x89
    values = torch.full((512, 32), 8, dtype=torch.uint8)
    for place in range(32):
        values[16 * place : 16 * place + 16, place] = torch.arange(16)
    made = replace(
        call,
        w13=w13,
        w13_scale=torch.ones_like(call.w13_scale),
        w2=(values[:, ::2] | values[:, 1::2] << 4)[None],
        w2_scale=torch.full_like(call.w2_scale, 2.0**power),
    )
    want = (values.double() - 8).sum(1) * ACTIVATED * 2.0**power
    for row in of_ones(made, device):
        assert torch.equal(row, want.bfloat16().double())


@pytest.mark.parametrize("form", ["fp8-64", "fp8-16x128", "int4-128"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_blocks_of_scales(form, tokens, device):
    """Several groups of columns and blocks of K share a scale, and the last block of
    128 is not full."""
    compare(make_call(tokens, 2, 3, 192, 64, form=form), device)


@pytest.mark.parametrize("form", ["mxfp4", "fp8-128", "int4-128"])
@pytest.mark.parametrize("tokens", [1, 16, 32, 64])
def test_published_blocks(form, tokens, device):
    """At each number of rows in a tile; on a GPU at Flash's sizes, with eight
    experts."""
    sizes = (256, 128) if device.type == "cpu" else (4096, 2048)
    compare(make_call(tokens, 6, 8, *sizes, form=form), device)


def test_scale_of_nan_makes_nan_of_its_columns(make, device):
    call = make(3, 2, 2)
    w2_scale = call.w2_scale.clone()
    w2_scale[1, 1, 0] = nan_of(w2_scale)
    mine = compare(replace(call, w2_scale=w2_scale), device)
    columns = 64 // w2_scale.shape[1]
    assert mine[:, columns : 2 * columns].isnan().all()
    assert mine.isnan().sum() == 3 * columns


@pytest.mark.parametrize("tokens", [3, 40])
def test_an_fp8_code_of_nan_makes_nan_of_its_block(tokens, device):
    call = make_call(tokens, 1, 1, form="fp8")
    w2 = call.w2.clone()
    w2.view(torch.uint8)[0, 40, 3] = 0xFF
    mine = compare(replace(call, w2=w2), device)
    assert mine[:, 32:].isnan().all() and mine[:, :32].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_stays_alone(make, value, device):
    call = make(12, 2, 3)
    x = call.x.clone()
    x[4, 37] = value
    mine, clean = compare(replace(call, x=x), device), run(call, device)
    others = torch.arange(12) != 4
    assert not mine[4].isfinite().all()
    assert torch.equal(mine[others], clean[others])


@pytest.mark.parametrize("width", [80, 67])
def test_strided_rows(make, width, device):
    """Rows that begin at a word, and rows that begin between two."""
    call = make(5, 2, 4)
    wide = torch.full((5, width), torch.nan).bfloat16()
    wide[:, 3:67] = call.x
    compare(replace(call, x=wide[:, 3:67]), device)


def test_equal_calls_give_equal_bits(make, device):
    call = make(20, 3, 4)
    assert torch.equal(run(call, device), run(call, device))


def test_result_and_workspace_of_the_caller(make, device):
    """A dirty workspace of exactly the size, and a result with a stride."""
    call = make(6, 2, 4)
    size = experts.workspace_size(6, 2, 4, 64, 32)
    workspace = torch.full((size + 64,), 255, dtype=torch.uint8, device=device)
    wide = torch.full((6, 80), 7.0, dtype=torch.bfloat16, device=device)
    result = experts.routed_experts(
        *on(call, device),
        swiglu_limit=10.0,
        out=wide[:, 5:69],
        workspace=workspace[:size],
        scale_block=call.form.scale_block,
    )
    assert result.data_ptr() == wide[:, 5:69].data_ptr()
    assert torch.equal(result.cpu(), run(call, device))
    assert (workspace[size:] == 255).all()
    assert (wide[:, :5] == 7).all() and (wide[:, 69:] == 7).all()


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
@pytest.mark.parametrize("columns", [32, 64, 96, 192, 288, 576, 1536, 4096])
@pytest.mark.parametrize(("rows", "tiles"), [(8, 6), (8, 352), (16, 40), (64, 448)])
@pytest.mark.parametrize("bits", [4, 8])
def test_programs_have_all_columns(rows, tiles, columns, device_type, bits):
    for depth in (32, 96, 256, 2304, 4096):
        shape = rows, tiles, depth, columns
        found = _experts_config.product(*shape, device_type, bits)
        width = 32 * found.cols * found.warps_n
        assert found.programs * width == columns
        assert found.warps_k < 2 * (depth // 32)
        assert found.even_k == (depth // 32 % found.warps_k == 0)


@pytest.mark.parametrize("pairs", [1, 6, 8, 9, 96, 272, 292, 293, 384, 49152])
@pytest.mark.parametrize("count", [1, 4, 32, 256])
def test_tiles_suffice(pairs, count):
    """However pairs fall on experts, their tiles fit."""
    block = _experts_config.block_m(pairs, count)
    worst = 0
    for used in range(1, min(pairs, count) + 1):
        # All experts but one have one pair more than fills whole tiles.
        rest = pairs - used
        worst = max(worst, used + rest // block)
    assert worst <= num_tiles(pairs, count, block)


def test_replayed_with_other_ids(make, device):
    """A captured graph is right for any choice: no launch depends on the ids."""
    call = make(6, 2, 4)
    arguments = on(call, device)
    other = make(6, 2, 4, seed=1).ids
    other[2] = -1
    out = torch.empty(6, 64, dtype=torch.bfloat16, device=device)
    workspace = torch.empty(
        experts.workspace_size(6, 2, 4, 64, 32), dtype=torch.uint8, device=device
    )

    def step() -> None:
        experts.routed_experts(
            *arguments,
            swiglu_limit=10.0,
            out=out,
            workspace=workspace,
            scale_block=call.form.scale_block,
        )

    step()
    again = step
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        again = graph.replay
    for ids in (other, call.ids):
        arguments[6].copy_(ids)
        again()
        assert torch.equal(out.cpu(), run(replace(call, ids=ids), device))


NAMES = ("x", "w13", "w13_scale", "w2", "w2_scale", "weights", "ids", "expert_map")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("x", torch.zeros(3, 64), "hidden_states.dtype"),
        ("x", torch.zeros(3, 60).bfloat16(), "w13.shape"),
        ("ids", torch.zeros(2, 2, dtype=torch.int32), "topk_ids.shape"),
        ("ids", torch.zeros(3, 2), "topk_ids.dtype"),
        ("weights", torch.zeros(3, 1), "topk_weights.shape"),
        ("expert_map", torch.zeros(8), "expert_map.dtype"),
    ],
)
def test_bad_input_is_named(make, place, value, message, device):
    call = make(3, 2, 4)
    arguments = on(call, device)
    arguments[NAMES.index(place)] = value.to(device)
    with pytest.raises(ValueError, match=message):
        experts.routed_experts(*arguments, scale_block=call.form.scale_block)


BYTES, E4M3 = torch.uint8, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("form", "place", "shape", "dtype", "message"),
    [
        ("mxfp4", "w13", (4, 48, 32), BYTES, "w13_scale.shape"),
        ("mxfp4", "w13_scale", (4, 64, 2), torch.float32, "w13_scale.dtype"),
        ("mxfp4", "w2", (4, 64, 8), BYTES, "w2.shape"),
        ("mxfp4", "w2_scale", (4, 64, 1), torch.bfloat16, "w2_scale.dtype"),
        ("fp8", "w13", (4, 64, 64), torch.float8_e5m2, "w13.dtype"),
        ("fp8", "w13", (4, 96, 64), E4M3, "w13_scale.shape"),
        ("fp8", "w13_scale", (4, 2, 2), BYTES, "w13_scale.dtype"),
        ("fp8", "w13_scale", (4, 1, 2), torch.float32, "w13_scale.shape"),
        ("fp8", "w2", (4, 64, 32), BYTES, "w2.dtype"),
        ("fp8", "w2", (4, 64, 16), E4M3, "w2.shape"),
        ("fp8", "w2_scale", (4, 2, 2), torch.float32, "w2_scale.shape"),
        ("int4", "w13_scale", (4, 64, 2), torch.float16, "w13_scale.dtype"),
        ("int4", "w13_scale", (4, 64, 1), torch.bfloat16, "w13_scale.shape"),
        ("int4", "w2", (4, 64, 32), E4M3, "w2.dtype"),
    ],
)
def test_bad_weights_are_named(form, place, shape, dtype, message, device):
    call = make_call(3, form=form)
    arguments = on(call, device)
    value = torch.zeros(shape, dtype=dtype, device=device)
    arguments[NAMES.index(place)] = value
    with pytest.raises(ValueError, match=message):
        experts.routed_experts(*arguments, scale_block=call.form.scale_block)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ((24, 32), r"scale_block\[0\]"),
        ((32, 48), r"scale_block\[1\]"),
        ((32, 0), r"scale_block\[1\]"),
        ((32, 64), "w13_scale.shape"),
        ((64, 32), "w13_scale.shape"),
    ],
)
def test_bad_blocks_are_named(block, message, device):
    arguments = on(make_call(3, form="fp8"), device)
    with pytest.raises(ValueError, match=message):
        experts.routed_experts(*arguments, scale_block=block)
    with pytest.raises(ValueError, match=message.replace("w13_", "weight_")):
        experts.arrange_fp8_experts(*arguments[1:3], block)


def test_a_block_across_gate_and_up_is_named(device):
    call = make_call(3, 2, 4, 64, 32, form="fp8")
    arguments = on(call, device)
    arguments[2] = torch.ones(4, 1, 1, device=device)
    with pytest.raises(ValueError, match=r"w13\.shape\[1\] = 64: .* multiple of 128"):
        experts.routed_experts(*arguments, scale_block=(64, 64))


def test_small_workspace_is_named(device):
    workspace = torch.empty(16, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"workspace\.shape"):
        experts.routed_experts(
            *on(make_call(3), device),
            workspace=workspace,
        )
