# SPDX-License-Identifier: Apache-2.0
"""Sparse decode that ends in the FP8 operands of the product behind it."""

from dataclasses import replace

import pytest
import torch
from decode_calls import batch, check, use
from fp8_operands import check_operands, codes_of, of_call, poisoned, rotating
from inputs import rotary_table

from kernels.xpu_dsv4.mla import sparse_decode as decode

HEADS = [(16, 8), (5, 5), (33, 11), (2, 1)]


@pytest.mark.parametrize(
    ("splits", "heads", "per_group"),
    [
        # One program ends in FP8, or the merge does: whole tiles of heads, a part of
        # one, groups that end within a tile, and a group per head.
        *((1, *heads) for heads in HEADS),
        *((3, *heads) for heads in HEADS),
        # The merge reads as many partials as there may be; most are empty.
        (20, 5, 5),
        (20, 2, 1),
    ],
)
def test_fp8_is_what_a_second_launch_makes_of_bf16(
    splits, heads, per_group, monkeypatch, device
):
    use(monkeypatch, splits=splits)
    arguments = batch(3, heads, 40, 20, device, seed=heads)
    arguments["topk_lens"].copy_(torch.tensor([40, 0, 3]))
    arguments["swa_lens"].copy_(torch.tensor([20, 0, 0]))
    arguments["attn_sink"][:2] = torch.tensor([float("inf"), float("-inf")])
    attention = check(arguments)
    operands = poisoned(3, heads, per_group, device)
    arguments["out"] = of_call(operands)
    decode.xpu_sparse_decode_fp8(**arguments)
    check_operands(operands, attention)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("other_types", [False, True])
def test_fp8_of_rotations_that_round(other_types, splits, monkeypatch, device):
    use(monkeypatch, splits=splits)
    arguments = batch(5, 16, 40, 20, device)
    attention = check(arguments)
    operands = poisoned(5, 16, 8, device, rotary_table)
    if other_types:
        operands = rotating(operands)
    arguments["out"] = of_call(operands)
    decode.xpu_sparse_decode_fp8(**arguments)
    check_operands(operands, attention, exactly=False)


@pytest.mark.parametrize("splits", [1, 2])
def test_replay_of_a_graph_that_writes_fp8(splits, monkeypatch, device):
    if device.type != "cuda":
        pytest.skip("graphs are captured on a GPU only")
    use(monkeypatch, splits=splits)
    arguments = batch(4, 16, 40, 20, device)
    workspace = torch.empty(4 * 16 * splits * 514, device=device)
    operands = poisoned(4, 16, 8, device)
    arguments["out"] = of_call(operands)
    call = decode.xpu_sparse_decode_fp8
    call(**arguments, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**arguments, workspace=workspace)
    for name, value in batch(4, 16, 40, 20, device, seed=1).items():
        if isinstance(value, torch.Tensor) and name != "out" and "cache" not in name:
            arguments[name].copy_(value)
    operands.positions.copy_(operands.positions.flip(0))
    of_call(operands).values.view(torch.uint8).fill_(0x7F)
    graph.replay()
    in_bf16 = {**arguments, "out": torch.empty_like(arguments["q"])}
    call(**in_bf16, workspace=workspace)
    check_operands(operands, in_bf16["out"])


BAD = [
    ("values", lambda x: x.view(torch.uint8), r"values\.dtype"),
    ("values", lambda x: x[..., :4000], r"values\.shape"),
    ("values", lambda x: x[:1], r"values\.shape = \[1, 3, 4096\]: .* 16 heads"),
    ("values", lambda x: x.mT.contiguous().mT, r"values\.stride"),
    ("scales", lambda x: x.double(), r"scales\.dtype"),
    ("scales", lambda x: x[..., :31], r"scales\.shape"),
    ("scales", lambda x: x.transpose(0, 1).clone().transpose(0, 1), r"scales\.stride"),
    ("positions", lambda x: x[:2], r"positions\.shape"),
    ("positions", lambda x: x.to("meta"), "device"),
    ("cos_sin_cache", lambda x: x[:, :32], r"cos_sin_cache\.shape"),
    ("cos_sin_cache", lambda x: x.double(), r"cos_sin_cache\.dtype"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), BAD)
def test_bad_fp8_operands(name, spoil, message, device):
    arguments = batch(3, 16, 40, 20, device)
    out = of_call(poisoned(3, 16, 8, device))
    arguments["out"] = replace(out, **{name: spoil(getattr(out, name))})
    with pytest.raises(ValueError, match=message):
        decode.xpu_sparse_decode_fp8(**arguments)


def test_fp8_values_at_an_odd_address(device):
    """Two codes are stored at once."""
    arguments = batch(3, 16, 40, 20, device)
    odd = torch.empty(2 * 3 * 4096 + 1, dtype=torch.uint8, device=device)[1:]
    values = odd.view(torch.float8_e4m3fn).view(2, 3, 4096)
    out = of_call(poisoned(3, 16, 8, device))
    scales = torch.empty(2, 3, 32, device=device)
    arguments["out"] = replace(out, values=values, scales=scales)
    with pytest.raises(ValueError, match="an even address"):
        decode.xpu_sparse_decode_fp8(**arguments)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_score_of_nan_gives_nan_in_fp8(splits, monkeypatch, device):
    use(monkeypatch, splits=splits)
    arguments = batch(2, 16, 40, 20, device)
    arguments["q"][1, 3, 5] = float("nan")
    operands = poisoned(2, 16, 8, device)
    arguments["out"] = out = of_call(operands)
    decode.xpu_sparse_decode_fp8(**arguments)
    # [G, T, heads per group, 512]
    is_nan = (codes_of(out) & 0x7F).unflatten(-1, (8, 512)) == 0x7F
    assert bool(is_nan[0, 1, 3].all())
    assert int(is_nan.sum()) == 512
