# SPDX-License-Identifier: Apache-2.0
"""A packed checkpoint: the projections of compressor and indexer stay packed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import layer_parts, layout, model_configs, model_layers
from helpers import packed_projections as projections
from helpers.packed_formats import SERVED_BEFORE


@pytest.mark.parametrize("name", SERVED_BEFORE)
def test_every_projection_multiplies_what_is_packed(name: str, tmp_path: Path) -> None:
    projections.check(tmp_path, SERVED_BEFORE[name])


def test_the_weights_stay_packed(tmp_path: Path) -> None:
    layer, _ = projections.loaded(tmp_path, SERVED_BEFORE["mxfp4"])
    linear = layer_parts.projecting(layer).compressor.fused_wkv_wgate
    bits = linear.weight.numel() * linear.weight.element_size() * 8
    assert bits == 4 * linear.output_size * linear.input_size


@pytest.fixture
def bf16() -> Iterator[None]:
    """Parameters are made in the model's dtype, as vLLM's loader does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_an_fp8_checkpoint_keeps_them_in_bf16() -> None:
    config = model_configs.vllm_config(quantized=True)
    built = layer_parts.projecting(model_layers.attention_layer(config, 4))
    dtypes = {
        "compressor": built.compressor.fused_wkv_wgate.weight.dtype,
        "indexer's compressor": built.indexer.compressor.fused_wkv_wgate.weight.dtype,
        "indexer's weights": built.indexer.weights_proj.weight.dtype,
        "indexer's queries": built.indexer.wq_b.weight.dtype,
    }
    queries = dtypes.pop("indexer's queries")
    assert queries == torch.float8_e4m3fn, "nothing is in FP8"
    assert set(dtypes.values()) == {torch.bfloat16}, dtypes


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_projections_in_bf16_keep_fp32_results() -> None:
    torch.manual_seed(1)
    built = model_layers.attention_layer(model_configs.vllm_config(), 4)
    linear = layer_parts.projecting(built).compressor.fused_wkv_wgate
    linear.weight.data.normal_()
    hidden = torch.randn(projections.TOKENS, projections.HIDDEN).bfloat16()
    score = layer_parts.input_projections(built, hidden.to(layout.device()))[1]
    assert score.dtype == torch.float32
    assert (
        projections.off_by(score, hidden.double() @ linear.weight.cpu().double().T)
        < 1e-6
    )


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_other_platforms_keep_them_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_configs.vllm_config()
    SERVED_BEFORE["mxfp4"].take(config, [])
    layer = model_layers.attention_layer(config, 4)
    module = sys.modules[type(layer_parts.projecting(layer).compressor).__module__]
    other = layout.another_platform(module.current_platform)
    monkeypatch.setattr(module, "current_platform", other)
    config = model_configs.vllm_config()
    SERVED_BEFORE["mxfp4"].take(config, [])
    built = layer_parts.projecting(model_layers.attention_layer(config, 4))
    for linear in (built.compressor.fused_wkv_wgate, built.indexer.weights_proj):
        assert linear.weight.dtype == torch.bfloat16
