# SPDX-License-Identifier: Apache-2.0
"""Window-only layers rotate by plain RoPE, compressed layers by YaRN."""

import math
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers

POSITIONS = 2048


def angles(inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Values cos | sin `[POSITIONS, dim]` in float64 of frequencies `[dim / 2]`."""
    turns = torch.outer(
        torch.arange(POSITIONS, dtype=torch.float64), inverse_frequencies
    )
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def plain(theta: float, dim: int = 64) -> torch.Tensor:
    """Frequencies theta^(-2i/dim) of RoFormer's equation 15."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn(theta: float, dim: int = 64) -> torch.Tensor:
    """Frequencies of YaRN's section 3.2: those that turn less than `beta_slow` times
    over the trained context are divided by the factor, those that turn more than
    `beta_fast` times are kept, and a ramp over the dimensions joins them."""
    parameters: dict[str, Any] = layout.YARN
    trained = parameters["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(parameters["beta_fast"])), 0)
    high = min(math.ceil(dimension(parameters["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(
        0, 1
    )
    kept = plain(theta)
    return kept * (1 - ramp) + kept / parameters["factor"] * ramp


def off_by(layer: torch.nn.Module, frequencies: torch.Tensor) -> float:
    """The largest difference between the layer's table and the angles meant."""
    table = layer.rotary_emb.cos_sin_cache[:POSITIONS].double().cpu()
    return (table - angles(frequencies)).abs().max().item()


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_the_two_tables_differ() -> None:
    difference = angles(plain(layout.ROPE_THETA)) - angles(yarn(layout.ROPE_THETA))
    assert difference.abs().max() > 1


def test_window_only_layer_is_plain() -> None:
    layer = model_layers.attention_layer(model_configs.vllm_config(), 0)
    error = off_by(layer, plain(layout.ROPE_THETA))
    print(f"figure: off from plain RoPE by {error:.1e}")
    assert error < 1e-3, f"off from plain RoPE by {error:.3f}"


def test_window_only_layer_is_plain_after_a_compressed_one() -> None:
    config = model_configs.vllm_config()
    model_layers.attention_layer(config, 4)
    layer = model_layers.attention_layer(config, 0)
    error = off_by(layer, plain(layout.ROPE_THETA))
    print(f"figure: off from plain RoPE by {error:.1e}")
    assert error < 1e-3, f"off from plain RoPE by {error:.3f}"


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_table_reaches_the_last_position() -> None:
    layer = model_layers.attention_layer(model_configs.vllm_config(), 0)
    assert layer.rotary_emb.cos_sin_cache.shape == (layout.MAX_MODEL_LEN, 64)


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.parametrize("first", layout.COMPRESS_RATIOS)
@pytest.mark.parametrize("compress_ratio", (4, 128))
def test_compressed_layer_keeps_yarn(compress_ratio: int, first: int) -> None:
    config = model_configs.vllm_config()
    if first != compress_ratio:
        model_layers.attention_layer(config, first)
    layer = model_layers.attention_layer(config, compress_ratio)
    assert off_by(layer, yarn(layout.COMPRESS_ROPE_THETA)) < 1e-3
