# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a model may be divided between devices."""

from typing import TYPE_CHECKING

from vllm import envs
from vllm_xpu_dsv4.releases import LISTS_BALANCED_EXPERTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from vllm.config import VllmConfig


def tensor_parallel_size(vllm_config: "VllmConfig") -> str | None:
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


def hash_layers(config: "PreTrainedConfig") -> int:
    """How many layers choose experts by token id. Newer configurations list the kind
    of each layer instead."""
    if (count := getattr(config, "num_hash_layers", None)) is not None:
        return count
    return config.mlp_layer_types.count("hash_moe")


def pipeline_parallel_size(vllm_config: "VllmConfig") -> str | None:
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
    choosing = hash_layers(config)
    if end >= choosing:
        return None
    return (
        f"--pipeline-parallel-size {stages} leaves {end} layers on the first stage, "
        f"but the first {choosing} choose experts by token id, and later stages "
        "are given none. Use fewer stages, or VLLM_PP_LAYER_PARTITION with at least "
        f"{choosing} layers in its first entry."
    )


def decode_context_parallel_size(vllm_config: "VllmConfig") -> str | None:
    size = vllm_config.parallel_config.decode_context_parallel_size
    if size == 1:
        return None
    return (
        f"--decode-context-parallel-size {size} is not supported, keys of the sliding "
        "window cannot be divided between ranks. Drop it: the ranks of "
        "--tensor-parallel-size serve without it."
    )


def prefill_context_parallel_size(vllm_config: "VllmConfig") -> str | None:
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size == 1:
        return None
    return (
        f"--prefill-context-parallel-size {size} is not supported, no attention on XPU "
        "divides a prompt between ranks. Drop it, and use more ranks by "
        "--tensor-parallel-size."
    )


def microbatches(vllm_config: "VllmConfig") -> str | None:
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


def expert_placement(vllm_config: "VllmConfig") -> str | None:
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


def check_balanced_experts(vllm_config: "VllmConfig") -> None:
    """Refuse what the configuration takes and the model, which is no MixtureOfExperts
    on XPU, never does."""
    if LISTS_BALANCED_EXPERTS and vllm_config.parallel_config.enable_eplb:
        raise NotImplementedError(
            "DeepSeek V4 on XPU does not support expert load balancing (EPLB). "
            "Drop --enable-eplb; --enable-expert-parallel works without it."
        )
