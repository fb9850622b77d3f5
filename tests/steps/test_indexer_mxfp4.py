# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer with queries and keys in MXFP4."""

import pytest
import torch
from helpers import (
    batch_metadata,
    compressor_run,
    layout,
    model_configs,
    model_layers,
)
from helpers.indexer_batch import (
    RATIO,
    Batch,
    e2m1_values,
    mxfp4,
    quarter_turns,
    turned,
)

DIM = 128
FAR = 2**31 // (64 * 68) + 1


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "first_page"),
    [
        pytest.param((300, 70, 3), (1, 1, 1), FAR, id="decode-beyond-2-gigabytes"),
        pytest.param((270, 90, 40), (1, 6, 5), 0, id="mixed"),
    ],
)
def test_the_best_keys(
    seq_lens: tuple[int, ...], query_lens: tuple[int, ...], first_page: int
) -> None:
    Batch(seq_lens, query_lens, fp4=True, first_page=first_page).check()


def test_draft_tokens_choose_for_themselves() -> None:
    batch = Batch((300, 71), (2, 2), fp4=True, speculative_tokens=1)
    batch.check()


def test_the_compressor_writes_mxfp4_keys() -> None:
    """All partial states are 1, so that each entry is the weight of its norm, rotated
    by its position: a multiple of the ratio."""
    torch.manual_seed(0)
    config = model_configs.vllm_config()
    model_configs.take_mxfp4_indexer(config)
    compressor = model_layers.compressor(config, indexer=True)
    # RMS norm divides by a hair more than 1: stay clear of the midpoints of e2m1.
    codes = torch.randint(0, 16, (DIM,))
    scale = torch.exp2(torch.randint(-9, 9, (4,)).double()).repeat_interleave(32)
    codes[::32] = 7
    weight = e2m1_values(codes) * scale
    compressor.norm.weight.data = weight.float().to(layout.device())
    compressor.ape.data.zero_()
    kv_score = torch.ones(8, 4 * DIM)
    kv_score[:, 2 * DIM :] = 0
    table = quarter_turns(8)
    written = compressor_run.run(config, compressor, kv_score, table, [8])
    wanted = turned(weight.expand(2, 1, DIM), table[[0, RATIO]])[:, 0]
    stored = written.data[:2]
    got = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).long()
    power = torch.exp2(written.scales[:2].double() - 127).repeat_interleave(32, -1)
    error = (e2m1_values(got) * power - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-6, f"the keys are off by {error:.2g}"
    assert torch.equal(written.scales[:2].long(), mxfp4(wanted)[1] + 127)


def test_other_models_are_refused() -> None:
    """Only DeepSeek-V4 writes MXFP4 keys: the pages of another model with a sparse
    indexer stay FP8, whatever the option says."""
    config = model_configs.vllm_config()
    model_configs.take_mxfp4_indexer(config)
    indexer = model_layers.attention_layer(config, RATIO).indexer
    config.model_config.hf_config.model_type = "deepseek_v32"
    with pytest.raises((AssertionError, ValueError), match="only supported for Deep"):
        batch_metadata.indexer_builder(config, indexer)
    plain = model_configs.vllm_config()
    indexer = model_layers.attention_layer(plain, RATIO).indexer
    plain.model_config.hf_config.model_type = "deepseek_v32"
    batch_metadata.indexer_builder(plain, indexer)
    config.model_config = None
    backend = layout.module(layout.INDEXER_BACKEND)
    if uses_fp4 := getattr(backend, "dsa_indexer_uses_fp4", None):
        with pytest.raises(ValueError, match="only supported for Deep"):
            uses_fp4(config)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_refuse_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = layout.module(layout.INDEXER_BACKEND)
    other = layout.another_platform(backend.current_platform)
    monkeypatch.setattr(backend, "current_platform", other)
    with pytest.raises((AssertionError, ValueError), match="Blackwell"):
        Batch((70,), (1,), fp4=True)
