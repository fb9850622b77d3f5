# SPDX-License-Identifier: Apache-2.0
"""The MTP draft of the last pipeline stage embeds and scores as the target does.

Published checkpoints have one embedding and one output head, neither of them under
`mtp.0.`; the target has the embedding on its first stage and the head on its last.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers
from helpers.pipeline_stages import EAGLE, stage, stage_of_model

STAGES = 2
EMBEDDING = "model.embed_tokens.weight"


class Loaded:
    """The draft of the last of some stages, as vLLM loads it beside the target."""

    def __init__(self, stages: int) -> None:
        self.target = SimpleNamespace(
            model=stage_of_model("mtp", stages - 1, stages),
            lm_head=torch.nn.Linear(256, 128, bias=False),
        )
        self.embedding = torch.randn(128, 256)
        speculation = SimpleNamespace(
            apply_draft_overrides=lambda config: config,
            draft_model_config=None,
            draft_lm_head_quantization=None,
            moe_backend=None,
            kv_cache_dtype=None,
            attention_backend=None,
        )
        config = SimpleNamespace(speculative_config=speculation, load_config=None)
        utilities = layout.module(f"{EAGLE}.utils")
        with pytest.MonkeyPatch.context() as patch, stage(stages - 1, stages):
            patch.setattr(utilities, "get_model", self._model)
            for name in ("get_draft_load_config", "get_pp_safe_draft_load_config"):
                patch.setattr(utilities, name, lambda _: None, raising=False)
            self.draft = utilities.load_eagle_model(self.target, config)

    def _model(self, **_: Any) -> Any:
        config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
        draft = model_layers.draft_model(config)
        # As `torch.empty` may.
        draft.model.embed_tokens.weight.data.fill_(float("nan"))
        published = {
            "embed.weight": self.embedding,
            "head.weight": torch.randn(128, 256),
            "mtp.0.enorm.weight": torch.ones(256),
        }
        self.names = draft.load_weights(published.items())
        return draft

    @property
    def head(self) -> Any:
        (layer,) = self.draft.model.layers.values()
        return layer.shared_head.head


def test_the_draft_of_the_last_stage_has_the_embedding() -> None:
    loaded = Loaded(STAGES)
    got = loaded.draft.model.embed_tokens.weight
    assert not got.isnan().any(), "the draft embeds tokens by memory that nobody wrote"
    assert torch.equal(got.cpu(), loaded.embedding.to(got.dtype))
    assert EMBEDDING in loaded.names, "it does not say that it loaded it"


@pytest.mark.unchanged
def test_its_head_is_the_target_s() -> None:
    loaded = Loaded(STAGES)
    assert loaded.head is loaded.target.lm_head


@pytest.mark.unchanged
def test_without_stages_it_shares_both() -> None:
    loaded = Loaded(1)
    assert loaded.draft.model.embed_tokens is loaded.target.model.embed_tokens
    assert EMBEDDING not in loaded.names
    assert loaded.head is loaded.target.lm_head
