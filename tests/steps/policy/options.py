# SPDX-License-Identifier: Apache-2.0
"""A server's configuration names what DeepSeek-V4 on XPU cannot do."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout
from safetensors.torch import save_file

from . import starts


def transfer(connector: str, **told: Any) -> dict[str, Any]:
    kind = layout.module("vllm.config").KVTransferConfig
    return {
        "kv_transfer_config": kind(kv_connector=connector, kv_role="kv_both", **told)
    }


def several(*connectors: str) -> dict[str, Any]:
    members = [{"kv_connector": name, "kv_role": "kv_both"} for name in connectors]
    return transfer("MultiConnector", kv_connector_extra_config={"connectors": members})


SETTINGS: dict[str, Any] = {"alone": transfer, "of several": several}
OFFLOADS = layout.RELEASE >= (0, 26)
HOST = ["OffloadingConnector"] if OFFLOADS else []
INSTEAD = "Use OffloadingConnector" if OFFLOADS else "Drop --kv-transfer-config"
REFUSED = {
    "float16": ({"dtype": "float16"}, "--dtype bfloat16"),
    "e5m2 keys": ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8"),
    "bfloat16 keys": ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype fp8"),
    **{
        f"blocks of {size}": ({"block_size": size}, "--block-size 256")
        for size in (16, 64, 128, 512)
    },
    "ranks": ({"tensor_parallel_size": 4}, "--pipeline-parallel-size for more"),
    "keys of other ranks": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "--decode-context-parallel-size 2 is not supported, keys of the sliding",
    ),
    "prompts over ranks": (
        {"prefill_context_parallel_size": 2},
        "use more ranks by --tensor-parallel-size",
    ),
    "two batches": ({"enable_dbo": True}, "--enable-dbo is not supported"),
    "three batches": ({"ubatch_size": 3}, "--ubatch-size 3 is not supported"),
    "MTP on DSpark's stages": (
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        "Use method dspark in --speculative-config where",
    ),
    "experts of other ranks": (
        {
            "enable_expert_parallel": True,
            "enable_ep_weight_filter": True,
            "expert_placement_strategy": "round_robin",
        },
        "Drop one of the two",
    ),
    "embeddings": ({"enable_prompt_embeds": True}, "send text or token ids"),
    "adapters": ({"enable_lora": True}, "merge the adapter"),
    "CUDA's copies": (
        transfer("SimpleCPUOffloadConnector"),
        f"CUDA's own calls. {INSTEAD}",
    ),
    "a connector that nobody tried": (
        transfer("MooncakeConnector"),
        f"needs the package mooncake-transfer-engine. {INSTEAD}",
    ),
    "a connector that keeps nothing": (transfer("ExampleConnector"), "keeps nothing"),
    "a connector of one's own": (
        transfer("OffloadingConnector", kv_connector_module_path="my_connectors"),
        "OffloadingConnector of my_connectors",
    ),
    **{
        f"the host's memory, {name}": (
            told("OffloadingConnector"),
            "copies pages on CUDA and ROCm alone. Drop --kv-transfer-config",
        )
        # The release itself ends, after it read the weights.
        for name, told in SETTINGS.items()
        if not OFFLOADS
    },
    "a member of several": (
        several(*HOST, "SimpleCPUOffloadConnector"),
        "SimpleCPUOffloadConnector is not supported",
    ),
    "16 bits": ({"fields": {"quantization_config": None}}, "FP8 in blocks, with"),
}
# With the version of the model runner, where it matters.
ACCEPTED: dict[str, tuple[dict[str, Any], str]] = {
    "vLLM's own blocks": ({"block_size": None}, ""),
    "experts in order": (
        {"enable_expert_parallel": True, "enable_ep_weight_filter": True},
        "",
    ),
    "experts that stay": ({"enable_expert_parallel": True}, ""),
    "all experts read": (
        {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
        "",
    ),
    "embeddings for layers that read no token ids": (
        {"enable_prompt_embeds": True, "fields": {"num_hash_layers": 0}},
        "",
    ),
    "fewer layers than choose by token id": (
        {"hf_overrides": {"num_hidden_layers": 1}},
        "1",
    ),
}
ATTENTION = "model.layers.0.self_attn.kv_proj.weight"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "quantization_config": None,
}
ADAPTIVE = {"method": "dspark", "enable_adaptive_verification": True}
DSPARK = {
    "dspark_block_size": 3,
    "dspark_markov_rank": 128,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [0, 2],
    "n_mtp_layers": 2,
}
NO_STAGES = dict.fromkeys(DSPARK)
DRAFTS = ["mtp"]
if layout.WITH_XPU_FOLDER:
    DRAFTS.append("dspark")
    staged = {"method": "dspark", "num_speculative_tokens": 3}
    REFUSED["DSpark without stages"] = (
        {"speculative_config": staged, "fields": NO_STAGES},
        "Use method mtp in --speculative-config, or a checkpoint with stages",
    )
if hasattr(
    layout.module("vllm.config").SpeculativeConfig, "enable_adaptive_verification"
):
    REFUSED["adaptive verification"] = (
        {"speculative_config": ADAPTIVE | {"num_speculative_tokens": 3}},
        "Drop it from --speculative-config",
    )
if hasattr(layout.module(layout.MODEL).DeepseekV4ForCausalLM, "supports_pp"):
    REFUSED["stages"] = (
        {"pipeline_parallel_size": 3},
        "VLLM_PP_LAYER_PARTITION with at least 2",
    )
    REFUSED["two stages"] = (
        {"pipeline_parallel_size": 2, "fields": {"num_hash_layers": 3}},
        "VLLM_PP_LAYER_PARTITION with at least 3",
    )
    ACCEPTED["stages of V1"] = ({"pipeline_parallel_size": 3}, "0")
    ACCEPTED["token ids for one stage alone"] = (
        {"pipeline_parallel_size": 3, "fields": {"num_hash_layers": 1}},
        "1",
    )


def configured(folder: Path, **options: Any) -> Any:
    """The configuration of a server of a model with three layers, two of which choose
    experts by token id."""
    fields = DSPARK | {"num_hash_layers": 2} | options.pop("fields", {})
    return starts.configured(folder, fields, **options)


def end_of_configuration(folder: Path, **options: Any) -> str:
    return starts.end(lambda: configured(folder, **options))


@pytest.mark.parametrize("case", REFUSED)
def test_it_says_what_to_use(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, advice = REFUSED[case]
    if "pipeline_parallel_size" in options:
        # V1 gives token ids to every stage.
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    end = end_of_configuration(tmp_path, **options)
    assert "DeepSeek V4 on XPU" in end, f"the start ends with {end}"
    assert advice in end


@pytest.mark.unchanged
@pytest.mark.parametrize("case", ACCEPTED)
def test_what_may_be_asked(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, runner = ACCEPTED[case]
    if runner:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    assert end_of_configuration(tmp_path, **options) == "a configuration"


def test_what_is_not_there_is_not_checked(tmp_path: Path) -> None:
    """A configuration without a model, and drafts that no model makes."""
    module = layout.module("vllm_xpu_dsv4.start")
    module.check_start(SimpleNamespace(model_config=None, additional_config={}))
    config = configured(tmp_path)
    config.speculative_config = SimpleNamespace(
        method="suffix", draft_model_config=None
    )
    assert not [reason for check in module.V4_CHECKS if (reason := check(config))]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.hc_head.hc_fn", ATTENTION])
@pytest.mark.parametrize("listed", ["by an index", "in one file"])
def test_tensors_of_transformers(tmp_path: Path, name: str, listed: str) -> None:
    """Those that it saves by its own names, and those in "the original format"."""
    write_names(tmp_path, ["model.layers.0.attn.attn_sink", name], listed)
    end = end_of_configuration(tmp_path)
    assert "DeepSeek V4 on XPU: a checkpoint that" in end, f"the start ends with {end}"
    assert f"{name} is not a name of DeepSeek's. Use a checkpoint in" in end


@pytest.mark.unchanged
@pytest.mark.parametrize("listed", ["by an index", "in one file"])
def test_tensors_of_deepseek(tmp_path: Path, listed: str) -> None:
    names = ["embed.weight", "head.weight", "hc_head_fn", "layers.0.attn.wkv.weight"]
    write_names(tmp_path, [*names, "mtp.0.hc_head_fn"], listed)
    assert end_of_configuration(tmp_path) == "a configuration"


@pytest.mark.unchanged
def test_a_file_beside_those_of_the_index_is_not_read(tmp_path: Path) -> None:
    write_names(tmp_path, [ATTENTION], "in one file")
    write_names(tmp_path, ["layers.0.attn.wkv.weight"], "by an index")
    assert end_of_configuration(tmp_path) == "a configuration"


@pytest.mark.unchanged
def test_a_file_that_is_cut_off_is_left_to_the_loader(tmp_path: Path) -> None:
    write_names(tmp_path, ["layers.0.attn.wkv.weight"], "in one file")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert end_of_configuration(tmp_path) == "a configuration"


def write_names(folder: Path, names: list[str], listed: str) -> None:
    """The names of a checkpoint's tensors, as its files have them."""
    if listed == "in one file":
        tensors = {name: torch.zeros(1) for name in names}
        save_file(tensors, folder / "model.safetensors")
    else:
        file = "model-00001-of-00001.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_keys_are_fp8_unless_another_type_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, kv_cache_dtype="auto")
    kept = config.cache_config.cache_dtype
    assert kept == "fp8", f"the start ends with keys of {kept}"


@pytest.mark.unchanged
def test_what_is_served_stays(tmp_path: Path) -> None:
    config = configured(tmp_path, tensor_parallel_size=2)
    assert config.cache_config.cache_dtype == "fp8"


@pytest.mark.unchanged
@pytest.mark.parametrize("method", DRAFTS)
def test_the_draft_that_a_checkpoint_has(tmp_path: Path, method: str) -> None:
    speculation = {"method": method, "num_speculative_tokens": 3}
    fields = NO_STAGES if method == "mtp" else {}
    config = configured(tmp_path, speculative_config=speculation, fields=fields)
    assert config.speculative_config.method == method


def test_each_connector_is_served_or_refused(tmp_path: Path) -> None:
    """A release that brings a new one fails here until somebody says which."""
    end = end_of_configuration(tmp_path, **transfer("HF3FSKVConnector"))
    assert "HF3FSKVConnector is not" in end, f"the start ends with {end}"
    factory = layout.module("vllm.distributed.kv_transfer.kv_connector.factory")
    module = layout.module("vllm_xpu_dsv4.connectors")
    known = (*module.CONNECTORS, *module.NO_CONNECTORS, *module.UNTRIED_CONNECTORS)
    assert len(known) == len(set(known))
    unknown = set(factory.KVConnectorFactory._registry) - {*known, "MultiConnector"}
    assert not unknown
    for name in {*module.NO_CONNECTORS, *module.UNTRIED_CONNECTORS}:
        reason = module.not_transferred(name, None, {})
        assert f"{name} is not" in reason
        told = {"connectors": [{"kv_connector": it} for it in (*HOST, name)]}
        assert reason in module.not_transferred("MultiConnector", None, told)


@pytest.mark.unchanged
def test_connectors_that_are_served(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{}]
    for told in options + [made(name) for made in (transfer, several) for name in HOST]:
        assert end_of_configuration(tmp_path, **told) == "a configuration"


@pytest.mark.unchanged
def test_a_transfer_without_a_connector_ends_in_vllms_words(tmp_path: Path) -> None:
    transfers = layout.module("vllm.config").KVTransferConfig()
    end = end_of_configuration(tmp_path, kv_transfer_config=transfers)
    assert "DeepSeek V4 on XPU" not in end


@pytest.mark.unchanged
def test_a_draft_may_have_another_cache(tmp_path: Path) -> None:
    """Its configuration is the target's with a cache of its own, checked once more."""
    config = configured(tmp_path)
    config.cache_config.cache_dtype = "bfloat16"
    config.cache_config.block_size = 16
    layout.module("vllm.platforms").current_platform.check_and_update_config(config)
    assert config.cache_config.cache_dtype == "bfloat16"


def test_a_configuration_with_more_of_another_kind(tmp_path: Path) -> None:
    """`additional_config` may be any object that has a hash: it stays as it is."""
    config, platform = configured(tmp_path), layout.module("vllm.platforms")
    given = config.additional_config = object()
    check = platform.current_platform.check_and_update_config
    check(config)
    assert config.additional_config is given
    config.model_config.dtype = torch.float16
    end = starts.end(lambda: check(config))
    assert "Use --dtype bfloat16" in end, f"the start ends with {end}"


@pytest.mark.unchanged
def test_other_models_are_not_asked(tmp_path: Path) -> None:
    options = {"dtype": "float16", "block_size": 64, "kv_cache_dtype": "auto"}
    allowed = {"enable_prompt_embeds": True, "enable_lora": True}
    config = configured(tmp_path, fields=LLAMA, **options, **allowed)
    kept = config.cache_config
    assert (kept.cache_dtype, kept.block_size) == ("auto", 64)


@pytest.mark.unchanged
def test_the_cpu_does_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path)
    config.model_config.dtype = torch.float16
    config.cache_config.cache_dtype = "auto"
    monkeypatch.setattr(os, "environ", os.environ.copy())
    platform = layout.module("vllm.platforms.cpu").CpuPlatform
    platform.check_and_update_config(config)
    assert config.cache_config.cache_dtype == "auto"
