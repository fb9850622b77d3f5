# SPDX-License-Identifier: Apache-2.0
"""The indexer of V4.1 scores FP8 keys in pages of 128 and takes MXFP4 keys."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, pin_ops

OP = "fp8_paged_mqa_logits"
HEADS, DIM, WIDTH = 32, 128, 300
LENS = (300, 3, 129)


def scored(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Scores of a decode step, those in float64, and which ops ran. A page of the
    cache has a gap behind it, as beside other caches of a block."""
    torch.manual_seed(page)
    device, blocks = layout.device(), -(-WIDTH // page)
    count = blocks * len(LENS) + 1
    keys = torch.randn(count, page, DIM).to(torch.float8_e4m3fn)
    scales = torch.rand(count, page) + 0.5
    memory = torch.zeros(count, page * (DIM + 4) + 192, dtype=torch.uint8)
    memory[:, : page * DIM] = keys.view(torch.uint8).flatten(1)
    memory[:, page * DIM : page * (DIM + 4)] = scales.view(torch.uint8)
    cache = memory.to(device)[:, : page * (DIM + 4)].unflatten(1, (page, 1, DIM + 4))
    table = torch.randperm(count)[: blocks * len(LENS)].view(len(LENS), blocks)
    q = torch.randn(len(LENS), 1, HEADS, DIM).to(torch.float8_e4m3fn)
    weights = torch.randn(len(LENS), HEADS)
    layout.module("vllm._xpu_ops")
    with pin_ops.recorded(monkeypatch, OP) as calls:
        got = torch.ops.vllm.xpu_fp8_paged_mqa_logits(
            q.to(device),
            cache,
            weights.to(device),
            torch.tensor(LENS, dtype=torch.int32, device=device),
            table.int().to(device),
            torch.zeros(1, dtype=torch.int32, device=device),
            WIDTH,
        )
    wanted = torch.full((len(LENS), WIDTH), -torch.inf, dtype=torch.float64)
    for row, length in enumerate(LENS):
        own = keys[table[row]].flatten(0, 1).double()[:length]
        products = (q[row, 0].double() @ own.T).relu()
        scale = scales[table[row]].flatten()[:length]
        wanted[row, :length] = weights[row].double() @ products * scale
    return got.cpu(), wanted, calls


def test_pages_of_128_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    got, wanted, calls = scored(128, monkeypatch)
    assert not calls, "the op is written for pages of 64 keys, not for pages of 128"
    for row, length in enumerate(LENS):
        error = (got[row, :length] - wanted[row, :length]).abs().max()
        assert error < 1e-3 * wanted[row, :length].abs().max()


@pytest.mark.unchanged
def test_pages_of_64_keys_stay_with_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    got, wanted, calls = scored(64, monkeypatch)
    assert calls == [OP]
    valid = wanted.isfinite()
    assert (got[valid] - wanted[valid]).abs().max() < 1e-3 * wanted[valid].abs().max()


def uses_mxfp4(model_type: str | None) -> Any:
    config = model_configs.vllm_config()
    model_configs.take_mxfp4_indexer(config)
    if model_type is None:
        config.model_config = None
    else:
        config.model_config.hf_config.model_type = model_type
    return layout.module(layout.INDEXER_BACKEND).dsa_indexer_uses_fp4(config)


def test_mxfp4_keys() -> None:
    try:
        assert uses_mxfp4("deepseek_v41")
    except ValueError as error:
        pytest.fail(str(error))


@pytest.mark.unchanged
@pytest.mark.parametrize("model_type", ["deepseek_v32", None])
def test_other_models_are_refused(model_type: str | None) -> None:
    assert uses_mxfp4("deepseek_v4")
    with pytest.raises(ValueError, match="only supported for DeepSeek-V4"):
        uses_mxfp4(model_type)
