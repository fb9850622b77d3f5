# SPDX-License-Identifier: Apache-2.0
"""DSpark of V4.1 on XPU drafts with the layers of XPU's model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, v41
from helpers.v41_drafts import DRAFT, METHOD

ARCHITECTURE = "DSparkV41DraftModel"
NVIDIA = "vllm.models.deepseek_v41.nvidia"


def configured(folder: Path, **options: Any) -> Any:
    return v41.configured(folder, DRAFT, speculative_config=METHOD | options)


def end_of_start(folder: Path) -> Any:
    """The draft, beside the model that it drafts for."""
    config = configured(folder)
    registry = layout.module(v41.REGISTRY).ModelRegistry
    utilities = layout.module("vllm.utils.torch_utils")
    with (
        model_configs.current(config),
        layout.worker(),
        utilities.set_default_torch_dtype(torch.bfloat16),
    ):
        kind = registry.models[ARCHITECTURE].load_model_cls()
        try:
            return kind(vllm_config=config)
        except Exception as error:
            pytest.fail(f"the start ends with {type(error).__name__}: {error}")


def test_its_layers(tmp_path: Path) -> None:
    draft = end_of_start(tmp_path).model
    assert isinstance(draft, layout.module(f"{NVIDIA}.dspark").DSparkDeepseekV4Model)
    found = [
        (type(layer).__name__, type(layer.attn).__name__, layer.ffn.n_routed_experts)
        for layer in draft.layers
    ]
    assert found == [("DeepseekV41XPUDecoderLayer", "DeepseekV41XPUAttention", 4)] * 2


def take_rank(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Be one of two stages."""
    group = SimpleNamespace(
        world_size=2, rank_in_group=rank, is_first_rank=not rank, is_last_rank=rank == 1
    )
    for name in (
        "vllm.distributed.parallel_state",
        "vllm.model_executor.models.utils",
        f"{NVIDIA}.model",
    ):
        patch.setattr(layout.module(name), "get_pp_group", lambda: group, raising=False)


def stage_of(folder: Path, rank: int) -> Any:
    """The target's layers of one of two stages, before the second's first source."""
    config = configured(folder)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.MonkeyPatch.context() as patch:
        take_rank(rank, patch)
        patch.setenv("VLLM_PP_LAYER_PARTITION", "2,2")
        model = v41.built(config).language_model.model
        model._set_aux_hidden_state_layers((1, 2, 3))
    return model


def test_the_draft_s_inputs_cross_the_stages(tmp_path: Path) -> None:
    """The target says so, sends those of the first stage, and has the embedding that
    the draft shares on the last. Layer 2 is the first of the second stage: what enters
    it is made on the first."""
    first, last = stage_of(tmp_path, 0), stage_of(tmp_path, 1)
    assert last.supports_aux_hidden_states_over_pp
    assert isinstance(last.embed_tokens, type(first.embed_tokens))
    assert last._aux_upstream_total_cached == 2
    states = [torch.full((2, 3), float(n)) for n in range(2)]
    sent = first.pack_local_aux_hidden_states(states)
    found = last.collect_remote_aux_hidden_states(
        layout.module("vllm.sequence").IntermediateTensors(sent)
    )
    assert all(map(torch.equal, found, states))


def test_every_input_of_the_draft_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What enters layers 1, 2 and 3, in that order, through both stages; here a layer
    counts."""
    module = layout.module(f"{NVIDIA}.model")
    monkeypatch.setattr(module, "mhc_post_tilelang", lambda states, *_: states)
    monkeypatch.setattr(module, "hc_collapse_triton", lambda states, _: states[:, 0])

    def count(states: Any, *given: Any, capture_previous_aux: bool, **_: Any) -> Any:
        # A stage's first layer has no residual, and captures nothing.
        captures = capture_previous_aux and given[5] is not None
        aux = states[:, 0] if captures else None
        return states + 1, states, states, states, states, aux

    given: Any = None
    ids, positions = torch.zeros(2, 2, dtype=torch.int64)
    for rank in range(2):
        stage = stage_of(tmp_path, rank)
        take_rank(rank, monkeypatch)
        stage._mtp_hidden_buffer, stage.norm = None, torch.nn.Identity()
        for layer in stage.layers[2 * rank : 2 * rank + 2]:
            layer.forward = count
        embedded = torch.zeros(2, 4, 3)
        given = stage.forward(ids, positions, given, inputs_embeds=embedded)
    end, found = given
    assert [each.unique().tolist() for each in (*found, end)] == [[1], [2], [3], [4]]


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


def test_keys_of_the_context_are_inserted_where_slots_are(tmp_path: Path) -> None:
    """By each layer of its own projection and norm; a profile run has no slots."""
    draft = end_of_start(tmp_path).model
    given: list[Any] = []
    draft.insert_kv = lambda *args: given.append(args)
    for number, layer in enumerate(draft.layers):
        layer.attn.fused_wqa_wkv.forward = lambda x: (x, None)
        layer.attn.kv_norm.forward = lambda x, number=number: x + number
    attn = draft.layers[1].attn
    projected = torch.randn(5, attn.q_lora_rank + attn.head_dim)
    positions, slots = torch.arange(5), torch.arange(5) + 7
    draft.precompute_and_store_context_kv(projected, positions)
    assert not given
    draft.precompute_and_store_context_kv(projected, positions, [None, slots])
    ((owner, keys, *where),) = given
    assert owner is attn and where[0] is positions and where[1] is slots
    assert torch.equal(keys, projected[:, attn.q_lora_rank :] + 1)


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
