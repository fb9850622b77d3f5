# SPDX-License-Identifier: Apache-2.0
"""DSpark's draft model stores keys of the context, which has no queries."""

from types import SimpleNamespace

import pytest
import torch
from helpers import kernel_trace, layout, model_configs, model_layers
from helpers import reference_attention as reference

HEADS, BLOCKS = 64, 3
SLOTS = (5, -1, 64, 190)
TOLERANCE = 4e-3


class Context:
    """A window-only draft layer of 64 heads, and hidden states to project for it."""

    def __init__(self) -> None:
        config = model_configs.vllm_config(heads=HEADS)
        utilities = layout.module("vllm.utils.torch_utils")
        with utilities.set_default_torch_dtype(torch.bfloat16):
            self.layer = model_layers.attention_layer(config, 0)
        generator = torch.Generator().manual_seed(7)
        weight = self.layer.fused_wqa_wkv.weight
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 16)
        spec = self.layer.swa_cache_layer.get_kv_cache_spec(config)
        self.block_size = spec.block_size
        pages = torch.zeros(BLOCKS, spec.page_size_bytes, dtype=torch.uint8)
        self.cache = reference.as_cache(pages.to(layout.device()), spec.block_size)
        self.layer.swa_cache_layer.kv_cache = self.cache
        hidden = torch.randn(len(SLOTS), weight.shape[1], generator=generator)
        self.hidden = hidden.to(layout.device(), torch.bfloat16)
        self.slots = torch.tensor(SLOTS).to(layout.device())
        self.positions = torch.arange(100, 100 + len(SLOTS)).to(layout.device())

    def project(self) -> torch.Tensor:
        """Ranks of the query and keys, which one product gives."""
        ranks_and_keys: torch.Tensor = self.layer.fused_wqa_wkv(self.hidden)[0]
        return ranks_and_keys

    def insert(self) -> None:
        """As DSpark does before it drafts."""
        kind = layout.module(layout.DSPARK).DSparkDeepseekV4Model
        draft = SimpleNamespace(layers=[SimpleNamespace(attn=self.layer)])
        kind.precompute_and_store_context_kv(
            draft, self.hidden, self.positions, [self.slots]
        )


def test_it_makes_no_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context()
    projected = context.project().nbytes
    with kernel_trace.traced(monkeypatch) as trace:
        context.insert()
    print(
        f"figure: the largest new tensor has {trace.largest // len(SLOTS)} B per token"
    )
    assert trace.largest <= projected, (
        f"makes a tensor of {trace.largest} bytes, where the keys' product has"
        f" {projected}"
    )


@pytest.mark.unchanged
def test_stored_keys() -> None:
    context = Context()
    ranks_and_keys = context.project()
    keys = context.layer.kv_norm(ranks_and_keys[:, context.layer.q_lora_rank :])
    table = context.layer.rotary_emb.cos_sin_cache[context.positions].cpu()
    expected = reference.quantize(reference.rotate(keys.cpu(), table))
    context.insert()
    cache = context.cache.cpu()
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            stored = reference.read(cache, *divmod(slot, context.block_size))
            assert reference.relative(stored, expected[row]) < TOLERANCE
    written = [
        slot
        for slot in range(BLOCKS * context.block_size)
        if reference.read(cache, *divmod(slot, context.block_size)).any()
    ]
    assert written == sorted(slot for slot in SLOTS if slot >= 0)
