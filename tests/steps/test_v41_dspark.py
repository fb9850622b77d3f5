# SPDX-License-Identifier: Apache-2.0
"""DSpark of V4.1 on XPU drafts with the layers of XPU's model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, v41
from helpers.loading import model_classes

ARCHITECTURE = "DSparkV41DraftModel"
DRAFT = {
    "dspark_block_size": 3,
    "dspark_markov_rank": 64,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "num_nextn_predict_layers": 2,
    "compress_ratios": [0, 2, 1, 1, 0, 0],
}
METHOD = {"method": "dspark", "num_speculative_tokens": 3}
NVIDIA = "vllm.models.deepseek_v41.nvidia"


def configured(folder: Path, **options: Any) -> Any:
    return v41.configured(folder, DRAFT, speculative_config=METHOD | options)


def end_of_start(folder: Path) -> Any:
    """The draft, beside the model that it drafts for."""
    try:
        config = configured(folder)
    except ValueError as error:
        pytest.fail(str(error))
    registry = layout.module(v41.REGISTRY).ModelRegistry
    utilities = layout.module("vllm.utils.torch_utils")
    with (
        model_configs.current(config),
        layout.worker(),
        utilities.set_default_torch_dtype(torch.bfloat16),
    ):
        return registry.models[ARCHITECTURE].load_model_cls()(vllm_config=config)


def test_its_layers(tmp_path: Path) -> None:
    draft = end_of_start(tmp_path).model
    assert isinstance(draft, layout.module(f"{NVIDIA}.dspark").DSparkDeepseekV4Model)
    found = [
        (type(layer).__name__, type(layer.attn).__name__, layer.ffn.n_routed_experts)
        for layer in draft.layers
    ]
    assert found == [("DeepseekV41XPUDecoderLayer", "DeepseekV41XPUAttention", 4)] * 2


@pytest.mark.unchanged
def test_every_class_names_what_a_checkpoint_lacks() -> None:
    kinds = model_classes()
    assert kinds, "no model is served"
    for name, kind in kinds.items():
        assert kind.requires_scales, name


def stage_of(folder: Path, rank: int) -> Any:
    """The target's layers of one of two stages, before the second's first source."""
    config = configured(folder)
    group = SimpleNamespace(
        world_size=2, rank_in_group=rank, is_first_rank=not rank, is_last_rank=rank == 1
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "vllm.distributed.parallel_state",
            "vllm.model_executor.models.utils",
            f"{NVIDIA}.model",
        ):
            patch.setattr(
                layout.module(name), "get_pp_group", lambda: group, raising=False
            )
        patch.setenv("VLLM_PP_LAYER_PARTITION", "2,2")
        model = v41.built(config).language_model.model
        model._set_aux_hidden_state_layers((1, 2, 3))
    return model


def test_the_draft_s_inputs_cross_the_stages(tmp_path: Path) -> None:
    """The target says so, sends those of the first stage, and has the embedding that
    the draft shares on the last. Layer 2 is the first of the second stage: what enters
    it is made on the first."""
    try:
        first, last = stage_of(tmp_path, 0), stage_of(tmp_path, 1)
    except ValueError as error:
        pytest.fail(str(error))
    assert last.supports_aux_hidden_states_over_pp
    assert isinstance(last.embed_tokens, type(first.embed_tokens))
    assert last._aux_upstream_total_cached == 2
    states = [torch.full((2, 3), float(n)) for n in range(2)]
    sent = first.pack_local_aux_hidden_states(states)
    found = last.collect_remote_aux_hidden_states(
        layout.module("vllm.sequence").IntermediateTensors(sent)
    )
    assert all(map(torch.equal, found, states))


def test_keys_are_inserted_without_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = end_of_start(tmp_path).model
    attn = draft.layers[0].attn
    given: list[Any] = []
    op = "xpu_deepseek_qnorm_rope_kv_insert"
    monkeypatch.setattr(torch.ops.vllm, op, lambda *args: given.append(args))
    kv = torch.zeros(5, attn.head_dim)
    slots, positions = torch.arange(5), torch.arange(5)
    draft.insert_kv(attn, kv, positions, slots)
    ((queries, *rest),) = given
    assert queries.shape == (5, 0, attn.head_dim)
    assert rest[0] is kv and rest[2] is slots and rest[3] is positions
    assert rest[-2:] == [attn.swa_cache_layer.block_size, False]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"method": "ngram", "prompt_lookup_max": 2},
            'drafting method ngram.*\'{"method": "dspark", '
            '"num_speculative_tokens": 3}\'',
        ),
        ({"enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ],
    ids=["ngram", "adaptive"],
)
def test_what_nobody_ran_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"(?s)DeepSeek V4.1 on XPU.*{reason}"):
        configured(tmp_path, **options)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_their_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layout.module(f"{NVIDIA}.dspark")
    layer = layout.module(f"{NVIDIA}.model").DeepseekV4DecoderLayer
    draft = module.DSparkDeepseekV4Model
    assert getattr(draft, "layer_cls", layer) is layer
    given: list[Any] = []
    monkeypatch.setattr(module, "_insert_context_kv", lambda *args: given.append(args))
    if hasattr(draft, "insert_kv"):
        draft.insert_kv(None, 1, 2, 3, 4)
        assert given == [(1, 2, 3, 4)]
    entry = module.DSparkDeepseekV4ForCausalLM
    assert getattr(entry, "model_cls", draft) is draft
