# SPDX-License-Identifier: Apache-2.0
"""Tensors of DeepSeek V4.1 that its parameters cannot hold."""

from pathlib import Path

import pytest
import torch
from helpers import layout, v41
from helpers.published import CHECKS, checked


def scale(columns: int, rows: int = 256) -> torch.Tensor:
    """Powers of two, one for each 32 x 32 of a layer."""
    exponents = torch.arange(rows // 32 * (columns // 32)) % 8 - 12
    return torch.exp2(exponents.float()).view(rows // 32, columns // 32)


def test_float32_scales_of_v41_keep_their_values(tmp_path: Path) -> None:
    model = v41.built(v41.configured(tmp_path))
    wo_b = model.language_model.model.layers[0].attn.wo_b
    rows, columns = wo_b.weight.shape
    given = scale(columns, rows)
    model.load_weights(checked(model, [("layers.0.attn.wo_b.scale", given)]))
    held = wo_b.weight_scale.data.cpu().view(torch.uint8).int() - 127
    held = torch.exp2(held.float())
    # Each row has its own.
    assert torch.equal(held, given.repeat_interleave(len(held) // len(given), 0))


WRONG = {
    "wo_b.scale": (lambda rows, columns: scale(columns, rows) * 1.1, "powers of two"),
    "wo_b.scale ": (lambda rows, columns: scale(columns, rows).bfloat16(), "bfloat16"),
    "wo_b.scale  ": (lambda rows, columns: scale(columns, rows)[:1], "32 x 32"),
    "wo_b.weight": (lambda rows, columns: torch.ones(rows, columns), "float32"),
    "attn_sink": (lambda *_: torch.ones(layout.HEADS).double(), "float64"),
    "attn_sink ": (lambda *_: torch.ones(layout.HEADS - 1), f"{layout.HEADS},"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tensor_of_v41_is_named(case: str, tmp_path: Path) -> None:
    """By its name, with what is read there."""
    model = v41.built(v41.configured(tmp_path))
    make, reason = WRONG[case]
    name = f"layers.0.attn.{case.strip()}"
    shape = model.language_model.model.layers[0].attn.wo_b.weight.shape
    with pytest.raises(ValueError, match=f"{name} .*{reason}"):
        model.load_weights(checked(model, [(name, make(*shape))]))


ENGRAM = {
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [96, 64],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
}
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OF_ENGRAM = {
    "layers.1.engram.embed.weight": ((96, 64), E4M3),
    "layers.1.engram.embed.scale": ((96, 2), E8M0),
    "layers.3.engram.embed.weight": ((64, 64), E4M3),
    "layers.3.engram.embed.scale": ((64, 2), E8M0),
    # Keys of four streams and a value of 256, from 2 x 2 columns.
    "layers.3.engram.wkv.weight": ((5 * 256, 256), E4M3),
    "layers.3.engram.wkv.scale": ((40, 8), E8M0),
}


@pytest.mark.parametrize("name", OF_ENGRAM)
def test_rows_of_engram_are_those_of_config(name: str, tmp_path: Path) -> None:
    config = v41.built(v41.configured(tmp_path)).config
    config.update(ENGRAM)
    check = layout.module(CHECKS).check_tensors
    (rows, columns), dtype = OF_ENGRAM[name]
    whole = torch.ones(rows, columns).to(dtype)
    ((_, passed),) = check(config, [(name, whole)])
    assert passed is whole
    for wrong in (whole[:-1], torch.ones(rows + 1, columns).to(dtype)):
        with pytest.raises(ValueError, match=f"{name} is "):
            list(check(config, [(name, wrong)]))
