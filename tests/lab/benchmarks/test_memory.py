# SPDX-License-Identifier: Apache-2.0
"""The computed memory, compared with Hugging Face's model and vLLM's page sizes."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab import memory
from lab.memory import FLASH, GIB, PRO, Device, Model


def test_the_totals_are_the_published_ones():
    """DeepSeek publishes 284 billion and 1.6 trillion."""
    assert round(memory.parameters(FLASH) / 1e9) == 284
    assert round(memory.parameters(PRO) / 1e12, 1) == 1.6


def test_the_count_is_that_of_hugging_faces_model():
    """The same shapes, every width small, on the meta device."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = Model("tiny", 256, 16, 64, 4, 32, 8, 96, 2, 3, 2, vocabulary=512)
    kinds = ["sliding_attention"] * 2 + [
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ]
    config = DeepseekV4Config(
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=16,
        q_lora_rank=64,
        o_groups=4,
        o_lora_rank=32,
        n_routed_experts=8,
        layer_types=kinds,
    )
    with torch.device("meta"):
        theirs = DeepseekV4ForCausalLM(config)
    counted = sum(parameter.numel() for parameter in theirs.parameters())
    # The correction biases of the router are buffers there.
    biases = model.experts * (model.layers - model.hashed)
    assert memory.parameters(model) - biases == counted


def test_pages_are_padded_as_vllm_pads_them():
    assert memory.page(64, 584) == 37_440
    assert memory.page(2, 584) == 1_728
    assert memory.page(64, 132) == 8_640
    assert memory.cache_per_token(FLASH) == 21 * (37_440 + 8_640) / 256 + 20 * 6.75


def test_what_is_sharded_halves_and_the_rest_stays():
    one, two, four = (memory.weights(FLASH, ranks) for ranks in (1, 2, 4))
    shared = 2 * two - one
    assert 0 < shared < 0.02 * one
    assert four == pytest.approx((one - shared) / 4 + shared)
    wide = memory.weights(FLASH, 1, widened=True)
    assert 1.02 * one < wide < 1.06 * one


def test_room_is_what_is_left():
    device = Device("x", 64)
    tokens = memory.room(FLASH, 4, device, share=0.9, activations=3)
    used = memory.weights(FLASH, 4) + tokens * memory.cache_per_token(FLASH)
    assert used == pytest.approx((64 * 0.9 - 3) * GIB)
    assert memory.room(PRO, 4, device) < 0


def test_stages_share_layers_by_the_fullest():
    whole = memory.weights(FLASH, 8)
    assert memory.weights(FLASH, 8, 2) == pytest.approx(whole * 22 / 43)
    assert memory.weights(replace(FLASH, by4=22), 8, 2) > whole / 2


def test_the_page_has_these_figures():
    page = (Path(__file__).parents[3] / "docs/deploying.md").read_text()
    flash, pro = (memory.cache_per_sequence(m) / 1e6 for m in (FLASH, PRO))
    assert f"takes {flash:.1f} MB (Flash) or {pro:.1f} MB (Pro) on top" in page
