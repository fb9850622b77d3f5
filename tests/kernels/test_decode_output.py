# SPDX-License-Identifier: Apache-2.0
"""Sparse decode that ends in the FP8 operands of the product behind it."""

import pytest
import torch
from decode_calls import batch, check, use
from fp8_operands import check_operands, codes_of, of_call, poisoned

from kernels.xpu_dsv4 import sparse_decode as decode


@pytest.mark.parametrize(("heads", "per_group"), [(16, 8), (5, 5), (33, 11), (2, 1)])
@pytest.mark.parametrize("splits", [1, 3, 20])
def test_fp8_is_what_a_second_launch_makes_of_bf16(
    splits, heads, per_group, tuned_for, monkeypatch, device
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


@pytest.mark.parametrize("splits", [1, 2])
def test_a_score_of_nan_gives_nan_in_fp8(splits, tuned_for, monkeypatch, device):
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
