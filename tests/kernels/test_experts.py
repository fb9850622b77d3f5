# SPDX-License-Identifier: Apache-2.0
"""Routed experts with MXFP4 weights against float64."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from compare import assert_close
from expert_calls import Call, make, on

from kernels.reference import experts as reference
from kernels.xpu_dsv4 import _experts_config, experts
from kernels.xpu_dsv4._experts_route import num_tiles


def run(call: Call, device: torch.device, **options: object) -> torch.Tensor:
    result = experts.routed_experts(
        *on(call, device), swiglu_limit=call.limit, **options
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
    )


def compare(call: Call, device: torch.device) -> torch.Tensor:
    mine, want = run(call, device), expected(call)
    finite = want[want.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    assert_close(mine, want, absolute=2**-6 * largest, relative=6e-3, name="rows")
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
def test_shapes(tokens, topk, count, hidden, intermediate, device):
    compare(make(tokens, min(topk, count), count, hidden, intermediate), device)


@pytest.mark.parametrize(("tokens", "topk"), [(2, 2), (12, 3)])
def test_forms_give_equal_bits(tokens, topk, device, monkeypatch):
    """Who loads ahead and how codes are unpacked changes no bit, nor what a scale of 0
    or 255 gives."""
    call = make(tokens, topk, 4, 96, 64)
    w13_scale, w2_scale = call.w13_scale.clone(), call.w2_scale.clone()
    w13_scale[:, 3, 1] = 0
    w2_scale[2, 7, 0] = 255
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
def test_a_slice_that_is_no_power_of_two(intermediate, device):
    compare(make(2, 2, 3, 128, intermediate), device)


@pytest.mark.parametrize("rows", [7, 8, 9, 15, 16, 17])
def test_all_tokens_to_one_expert(rows, device):
    call = make(rows, 1, 40, 32, 32)
    compare(replace(call, ids=torch.full((rows, 1), 3, dtype=torch.int32)), device)


@pytest.mark.parametrize("form", ["few", "many"])
def test_ids_that_are_not_here(form, device):
    """-1, past the end, and the ends of the type: those pairs add nothing."""
    call = make(9 if form == "few" else 40, 4, 12)
    ids = call.ids.clone()
    ids[1:5, 0] = torch.tensor([-1, 12, 2**31 - 1, -(2**31)])
    ids[7] = -1
    mine = compare(replace(call, ids=ids), device)
    assert not mine[7].any()


def test_int64_ids_beyond_int32(device):
    call = make(5, 2, 4)
    ids = call.ids.long()
    ids[:2, 0] = torch.tensor([2**32 + 1, -(2**40)])
    compare(replace(call, ids=ids), device)


@pytest.mark.parametrize("tokens", [4, 30])
def test_experts_of_another_rank(tokens, device):
    call = make(tokens, 3, 4)
    ids = torch.stack([torch.randperm(12)[:3] for _ in range(tokens)]).int()
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[torch.tensor([2, 9, 5, 11])] = torch.arange(4, dtype=torch.int32)
    compare(replace(call, ids=ids, expert_map=expert_map), device)


def test_a_rank_without_a_token(device):
    call = make(6, 2, 4)
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[4:] = torch.arange(4, dtype=torch.int32)
    mine = compare(replace(call, expert_map=expert_map), device)
    assert not mine.any()


@pytest.mark.parametrize("tokens", [5, 33])
def test_an_expert_chosen_twice_counts_twice(tokens, device):
    call = make(tokens, 4, 4)
    ids = call.ids.clone()
    ids[:, 2] = ids[:, 0]
    compare(replace(call, ids=ids), device)


def test_no_token(device):
    assert run(make(1, 2, 4), device).shape == (1, 64)
    call = make(1, 2, 4)
    none = replace(call, x=call.x[:0], weights=call.weights[:0], ids=call.ids[:0])
    assert run(none, device).shape == (0, 64)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_limit(limit, device):
    call = make(5, 2, 4)
    mine = compare(replace(call, limit=limit), device)
    assert not torch.equal(mine, run(call, device)) or limit is None


def test_every_code_under_every_scale(device):
    """One expert, one code of one block at a time: the product is exact."""
    call = make(1, 1, 1, 32, 32)
    w2 = torch.zeros_like(call.w2)
    codes = torch.arange(16, dtype=torch.uint8)
    w2[0, :16, 0] = codes
    w2[0, 16:, 8] = codes << 4
    x = torch.zeros_like(call.x)
    x[0, 0] = 1.0
    w13 = torch.zeros_like(call.w13)
    w13[0, :, 0] = 2
    for exponent in (0, 1, 2, 100, 127, 128, 129, 200, 254):
        scale = torch.full_like(call.w2_scale, exponent)
        unit = torch.full_like(call.w13_scale, 127)
        made = replace(
            call,
            x=x,
            w13=w13,
            w13_scale=unit,
            w2=w2,
            w2_scale=scale,
            weights=torch.ones(1, 1),
        )
        mine = run(made, device)[0].double()
        act = float(torch.nn.functional.silu(torch.tensor(1.0)).bfloat16())
        grid = reference.mxfp4_values(w2[0], scale[0]).sum(1) * act
        want = grid.bfloat16().double()
        tiny = grid.abs() < 2.0**-120
        assert torch.equal(mine[~tiny], want[~tiny]), exponent
        assert (mine[tiny].abs() < 2.0**-119).all()


def test_scale_of_nan_makes_nan_of_its_column(device):
    call = make(3, 2, 2)
    w2_scale = call.w2_scale.clone()
    w2_scale[1, 5, 0] = 255
    mine = compare(replace(call, w2_scale=w2_scale), device)
    assert mine[:, 5].isnan().all()
    assert mine.isnan().sum() == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_stays_alone(value, device):
    call = make(12, 2, 3)
    x = call.x.clone()
    x[4, 37] = value
    mine, clean = compare(replace(call, x=x), device), run(call, device)
    others = torch.arange(12) != 4
    assert not mine[4].isfinite().all()
    assert torch.equal(mine[others], clean[others])


@pytest.mark.parametrize("width", [80, 67])
def test_strided_rows(width, device):
    """Rows that begin at a word, and rows that begin between two."""
    call = make(5, 2, 4)
    wide = torch.full((5, width), torch.nan).bfloat16()
    wide[:, 3:67] = call.x
    compare(replace(call, x=wide[:, 3:67]), device)


def test_equal_calls_give_equal_bits(device):
    call = make(20, 3, 4)
    assert torch.equal(run(call, device), run(call, device))


def test_result_and_workspace_of_the_caller(device):
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
    )
    assert result.data_ptr() == wide[:, 5:69].data_ptr()
    assert torch.equal(result.cpu(), run(call, device))
    assert (workspace[size:] == 255).all()
    assert (wide[:, :5] == 7).all() and (wide[:, 69:] == 7).all()


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
@pytest.mark.parametrize("columns", [32, 64, 96, 192, 288, 576, 1536, 4096])
@pytest.mark.parametrize(("rows", "tiles"), [(8, 6), (8, 352), (16, 40), (64, 448)])
def test_programs_have_all_columns(rows, tiles, columns, device_type):
    for depth in (32, 96, 256, 2304, 4096):
        found = _experts_config.product(rows, tiles, depth, columns, device_type)
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


def test_replayed_with_other_ids(device):
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
            *arguments, swiglu_limit=10.0, out=out, workspace=workspace
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


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("x", torch.zeros(3, 64), "hidden_states.dtype"),
        ("x", torch.zeros(3, 60).bfloat16(), "w13.shape"),
        ("w13", torch.zeros(4, 48, 32, dtype=torch.uint8), "w13_scale.shape"),
        ("w13_scale", torch.zeros(4, 64, 2), "w13_scale.dtype"),
        ("w2", torch.zeros(4, 64, 8, dtype=torch.uint8), "w2.shape"),
        ("ids", torch.zeros(2, 2, dtype=torch.int32), "topk_ids.shape"),
        ("ids", torch.zeros(3, 2), "topk_ids.dtype"),
        ("weights", torch.zeros(3, 1), "topk_weights.shape"),
        ("expert_map", torch.zeros(8), "expert_map.dtype"),
    ],
)
def test_bad_input_is_named(place, value, message, device):
    names = ("x", "w13", "w13_scale", "w2", "w2_scale", "weights", "ids", "expert_map")
    arguments = on(make(3, 2, 4), device)
    arguments[names.index(place)] = value.to(device)
    with pytest.raises(ValueError, match=message):
        experts.routed_experts(*arguments)


def test_small_workspace_is_named(device):
    workspace = torch.empty(16, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"workspace\.shape"):
        experts.routed_experts(*on(make(3), device), workspace=workspace)
