# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What DeepSeek V4 on XPU cannot do, refused before a weight is read."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm import envs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from vllm.config import VllmConfig

BLOCK_SIZE = 256
"""Tokens of a block of the KV cache: 64 entries at ratio 4, 2 at ratio 128."""


CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_ds_mla")
"""Names of the one type of key that a page holds."""

CONNECTORS = ("OffloadingConnector",)
"""Of KV caches, as `--kv-transfer-config` names them, whose tokens were compared."""
NIXL = (
    "pages that it brings lack the last token's window, and in host memory mix those "
    "of several caches. Read and answer prompts in one server."
)
NO_CONNECTORS = {
    "SimpleCPUOffloadConnector": (
        "it pins and copies memory by CUDA's own calls. Use OffloadingConnector."
    ),
    "HiSparseConnector": (
        "it copies in CUDA's own streams and events. Use OffloadingConnector."
    ),
    "P2pNcclConnector": (
        "it sends by NCCL, which XPU lacks. Read and answer prompts in one server."
    ),
    "ExampleConnector": (
        "it saves in hooks of attention layers, which the model does not call, and so "
        "keeps nothing. Use OffloadingConnector."
    ),
    "DecodeBenchConnector": (
        "it fills pages with one value, and answers mean nothing. Drop it."
    ),
    "NixlConnector": NIXL,
    "NixlPullConnector": NIXL,
    "NixlPushConnector": NIXL,
}
"""Why they are refused, and what to use instead."""
UNTRIED_CONNECTORS = {
    "LMCacheConnectorV1": "needs the package lmcache, built for XPU",
    "LMCacheMPConnector": "needs the package lmcache, built for XPU, and its server",
    "MooncakeConnector": "needs the package mooncake-transfer-engine",
    "MooncakeStoreConnector": (
        "needs the package mooncake-transfer-engine and Mooncake's store"
    ),
    "FlexKVConnectorV1": "needs the package flexkv",
    "HF3FSKVConnector": "needs the package hf3fs_fuse and a 3FS file system",
    "MoRIIOConnector": "needs the package mori, of ROCm",
    "ExampleHiddenStatesConnector": "saves hidden states, and no pages",
}
"""What each takes to be tried."""

TRANSFORMERS = (".self_attn.", ".hc_head.", "lm_head.")
"""In names of tensors: of classes of Transformers alone."""


def check_deepseek_v4(vllm_config: "VllmConfig") -> None:
    """Refuse what the model cannot serve; other models pass.

    A KV cache whose type is left to vLLM becomes FP8, the only type there is. What was
    checked passes: a draft model's configuration is made from the target's, may have
    another KV cache, and comes by here again.

    Raises:
        ValueError: with the option, the reason, and what to use instead.

    """
    model_config = vllm_config.model_config
    if model_config is None:
        return
    config = model_config.hf_text_config
    if getattr(config, "model_type", None) != "deepseek_v4":
        return
    if getattr(config, "xpu_options_checked", False):
        return
    if vllm_config.cache_config.cache_dtype == "auto":
        vllm_config.cache_config.cache_dtype = "fp8"
    for reason_of in CHECKS:
        if reason := reason_of(vllm_config):
            raise ValueError(f"DeepSeek V4 on XPU: {reason}")
    config.xpu_options_checked = True


def _dtype(vllm_config: "VllmConfig") -> str | None:
    dtype = vllm_config.model_config.dtype
    if dtype == torch.bfloat16:
        return None
    return (
        f"dtype {str(dtype).removeprefix('torch.')} is not supported, its kernels "
        "take bfloat16 alone. Use --dtype bfloat16."
    )


def _quantization(vllm_config: "VllmConfig") -> str | None:
    if vllm_config.model_config.quantization is not None:
        return None
    return (
        "a checkpoint that is not quantized is not supported, it has no tested experts "
        "in 16 bits. Use DeepSeek's own checkpoints: FP8 in blocks, with experts in "
        "MXFP4 or FP8."
    )


def _cache_dtype(vllm_config: "VllmConfig") -> str | None:
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype in CACHE_DTYPES:
        return None
    return (
        f"--kv-cache-dtype {cache_dtype} is not supported, a page holds e4m3 keys "
        "with their scales. Use --kv-cache-dtype fp8."
    )


def _block_size(vllm_config: "VllmConfig") -> str | None:
    cache_config = vllm_config.cache_config
    if not cache_config.user_specified_block_size:
        return None
    if cache_config.block_size == BLOCK_SIZE:
        return None
    return (
        f"--block-size {cache_config.block_size} is not supported, the compressed "
        f"caches take blocks of {BLOCK_SIZE} tokens. Use --block-size {BLOCK_SIZE}."
    )


def _tensor_parallel_size(vllm_config: "VllmConfig") -> str | None:
    groups = vllm_config.model_config.hf_text_config.o_groups
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if groups % ranks == 0:
        return None
    return (
        f"--tensor-parallel-size {ranks} does not divide the model's {groups} output "
        f"groups (o_groups), each of which stays on one rank. Use at most {groups} "
        "ranks that divide them, and, where this version has pipeline stages for the "
        "model, --pipeline-parallel-size for more devices."
    )


def _hash_layers(config: "PreTrainedConfig") -> int:
    """How many layers choose experts by token id. Newer configurations list the kind
    of each layer instead."""
    if (count := getattr(config, "num_hash_layers", None)) is not None:
        return count
    return config.mlp_layer_types.count("hash_moe")


def _pipeline_parallel_size(vllm_config: "VllmConfig") -> str | None:
    """Model runner V2 gives token ids, which choose the experts of the first layers,
    to the first pipeline stage alone."""
    from vllm.distributed.utils import get_pp_indices

    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 or not getattr(
        vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER
    ):
        return None
    config = vllm_config.model_config.hf_text_config
    _, end = get_pp_indices(config.num_hidden_layers, 0, stages)
    hash_layers = _hash_layers(config)
    if end >= hash_layers:
        return None
    return (
        f"--pipeline-parallel-size {stages} leaves {end} layers on the first stage, "
        f"but the first {hash_layers} choose experts by token id, and later stages "
        "are given none. Use fewer stages, or VLLM_PP_LAYER_PARTITION with at least "
        f"{hash_layers} layers in its first entry."
    )


def _decode_context_parallel_size(vllm_config: "VllmConfig") -> str | None:
    size = vllm_config.parallel_config.decode_context_parallel_size
    if size == 1:
        return None
    return (
        f"--decode-context-parallel-size {size} is not supported, keys of the sliding "
        "window cannot be divided between ranks. Drop it: the ranks of "
        "--tensor-parallel-size serve without it."
    )


def _prefill_context_parallel_size(vllm_config: "VllmConfig") -> str | None:
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size == 1:
        return None
    return (
        f"--prefill-context-parallel-size {size} is not supported, no attention on XPU "
        "divides a prompt between ranks. Drop it, and use more ranks by "
        "--tensor-parallel-size."
    )


def _microbatches(vllm_config: "VllmConfig") -> str | None:
    parallel = vllm_config.parallel_config
    if not parallel.use_ubatching:
        return None
    option = f"--ubatch-size {parallel.ubatch_size}"
    if parallel.enable_dbo:
        option = "--enable-dbo"
    return (
        f"{option} is not supported, XPU has no exchange of experts' tokens that "
        "overlaps with another part of the batch (DeepEP, NIXL EP). Drop it."
    )


def _draft(vllm_config: "VllmConfig") -> str | None:
    """A checkpoint has one of the two drafts, both under the name `mtp`."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.draft_model_config is None:
        return None
    draft = speculation.draft_model_config.hf_config
    has_stages = bool(getattr(draft, "dspark_target_layer_ids", None))
    if speculation.method == "dspark" and not has_stages:
        return (
            "method dspark is not supported with this checkpoint, its config.json does "
            "not describe DSpark's stages (dspark_target_layer_ids). Use method mtp in "
            "--speculative-config, or a checkpoint with stages, such as "
            "deepseek-ai/DeepSeek-V4-Flash-DSpark."
        )
    if speculation.method == "mtp" and has_stages:
        return (
            "method mtp is not supported with this checkpoint, which has DSpark's "
            "stages in its place (dspark_target_layer_ids). Use method dspark in "
            "--speculative-config where this version has it, or drop the option."
        )
    return None


def _tensor_names(vllm_config: "VllmConfig") -> str | None:
    """Transformers saves tensors under other names than DeepSeek's, some of them also
    where it is asked for the original format."""
    for name in _names_in_checkpoint(vllm_config):
        if any(part in name for part in TRANSFORMERS):
            break
    else:
        return None
    return (
        f"a checkpoint that Transformers saved is not supported, {name} is not a name "
        "of DeepSeek's. Use a checkpoint in DeepSeek's own format, such as "
        "deepseek-ai/DeepSeek-V4-Flash."
    )


def _names_in_checkpoint(vllm_config: "VllmConfig") -> Iterator[str]:
    """By the index of its files, or else by the headers of local files. Those that
    cannot be read are left to the loader, which says more about them."""
    from safetensors import SafetensorError, safe_open

    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    model, revision = vllm_config.model_config.model, vllm_config.model_config.revision
    index = get_hf_file_to_dict("model.safetensors.index.json", model, revision)
    if index is not None:
        yield from index.get("weight_map", ())
        return
    for file in Path(model).glob("*.safetensors"):
        with suppress(SafetensorError), safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()


def _expert_placement(vllm_config: "VllmConfig") -> str | None:
    """The model's layers always place experts linearly; the filter heeds the option."""
    parallel = vllm_config.parallel_config
    placement = parallel.expert_placement_strategy
    if not parallel.enable_ep_weight_filter or placement == "linear":
        return None
    return (
        f"--expert-placement-strategy {placement} is not supported with "
        "--enable-ep-weight-filter, a rank would not read its own experts. Drop one of "
        "the two."
    )


def _kv_connector(vllm_config: "VllmConfig") -> str | None:
    """A list of what may be used: a connector that nobody tried can bring other pages
    without an error."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    return not_transferred(
        transfer.kv_connector,
        transfer.kv_connector_module_path,
        transfer.kv_connector_extra_config,
    )


def not_transferred(
    name: str | None, module_path: str | None, extra_config: dict[str, Any]
) -> str | None:
    """Why a connector is refused. MultiConnector is as good as its members."""
    if module_path is not None:
        return (
            f"a connector of one's own ({name} of {module_path}) is not tried with the "
            "model. Use OffloadingConnector."
        )
    if name == "MultiConnector":
        for member in extra_config.get("connectors", ()):
            if reason := not_transferred(
                member.get("kv_connector"),
                member.get("kv_connector_module_path"),
                member.get("kv_connector_extra_config", {}),
            ):
                return f"{reason} MultiConnector is refused for its member."
        return None
    if name in CONNECTORS:
        return None
    if name in NO_CONNECTORS:
        return f"{name} is not supported, {NO_CONNECTORS[name]}"
    needs = UNTRIED_CONNECTORS.get(name or "", "is not one of vLLM's")
    return (
        f"{name} is not tried with the model, and so not served: it {needs}. Use "
        "OffloadingConnector."
    )


def _prompt_embeds(vllm_config: "VllmConfig") -> str | None:
    model_config = vllm_config.model_config
    hash_layers = _hash_layers(model_config.hf_text_config)
    if not (model_config.enable_prompt_embeds and hash_layers):
        return None
    return (
        f"--enable-prompt-embeds is not supported, the first {hash_layers} layers "
        "choose experts by token id, which embeddings lack. Drop it and send text or "
        "token ids."
    )


def _lora(vllm_config: "VllmConfig") -> str | None:
    if vllm_config.lora_config is None:
        return None
    return (
        "LoRA (--enable-lora) is not supported, no experts on XPU take adapters. "
        "Drop it, and merge the adapter into the checkpoint."
    )


def _adaptive_verification(vllm_config: "VllmConfig") -> str | None:
    speculation = vllm_config.speculative_config
    if not getattr(speculation, "enable_adaptive_verification", False):
        return None
    return (
        "enable_adaptive_verification is not supported, the draft model has no "
        "confidence head and decode graphs take equal lengths alone. Drop it from "
        "--speculative-config."
    )


CHECKS: tuple[Callable[["VllmConfig"], str | None], ...] = (
    _dtype,
    _quantization,
    _cache_dtype,
    _block_size,
    _tensor_parallel_size,
    _pipeline_parallel_size,
    _decode_context_parallel_size,
    _prefill_context_parallel_size,
    _microbatches,
    _draft,
    _tensor_names,
    _expert_placement,
    _kv_connector,
    _prompt_embeds,
    _lora,
    _adaptive_verification,
)
"""Each gives the reason why a start is refused, or None."""
