# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What DeepSeek V4.1 on XPU cannot do besides what V4 cannot."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def stage_starts(vllm_config: "VllmConfig") -> list[int]:
    """The first layer of each pipeline stage but the first."""
    from vllm.distributed.utils import get_pp_indices

    stages = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    return [get_pp_indices(layers, stage, stages)[0] for stage in range(1, stages)]


def model_runner(vllm_config: "VllmConfig") -> str | None:
    if vllm_config.use_v2_model_runner:
        return None
    return (
        "model runner V1 is not supported, it knows no rings of compressor state. "
        "Use VLLM_USE_V2_MODEL_RUNNER=1."
    )


def experts(vllm_config: "VllmConfig") -> str | None:
    config = vllm_config.model_config.hf_config
    described = config.quantization_config or {}
    given = described.get("expert_dtype"), getattr(config, "expert_dtype", None)
    if (described.get("moe_quant_algo") or "").upper() == "NVFP4":
        kind = "NVFP4 (moe_quant_algo)"
    elif "fp8" in given:
        kind = "FP8 (expert_dtype)"
    else:
        return None
    return (
        f"experts in {kind} are not supported for V4.1. Use DeepSeek's own checkpoint, "
        "with experts in MXFP4."
    )


def speculation(vllm_config: "VllmConfig") -> str | None:
    speculation = vllm_config.speculative_config
    if speculation is None:
        return None
    if speculation.method != "dspark":
        count = getattr(vllm_config.model_config.hf_text_config, "dspark_block_size", 1)
        own = f'{{"method": "dspark", "num_speculative_tokens": {count}}}'
        return (
            f"the drafting method {speculation.method} is not tested with V4.1. Take "
            f"the checkpoint's own, --speculative-config '{own}'."
        )
    if speculation.enable_adaptive_verification:
        return (
            "enable_adaptive_verification is not tested with V4.1. Drop it from "
            "--speculative-config."
        )
    return None


def connectors(vllm_config: "VllmConfig") -> str | None:
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    return (
        f"KV connectors are not tested with V4.1. Drop --kv-transfer-config "
        f"({transfer.kv_connector})."
    )


def prompt_embeds(vllm_config: "VllmConfig") -> str | None:
    if not vllm_config.model_config.enable_prompt_embeds:
        return None
    return (
        "--enable-prompt-embeds is not supported, Engram looks tokens up by their ids, "
        "which embeddings lack. Drop it and send text or token ids."
    )


def data_parallel(vllm_config: "VllmConfig") -> str | None:
    size = vllm_config.parallel_config.data_parallel_size
    if size == 1:
        return None
    return (
        f"--data-parallel-size {size} is not tested with V4.1. Start a server for each "
        "replica, or use --tensor-parallel-size."
    )


def gathered_rows(vllm_config: "VllmConfig") -> str | None:
    """Prefill gathers the entries of a request into a buffer, which at ratio 1 has a
    row for each token. Kernels address its elements by 32 bits."""
    config = vllm_config.model_config.hf_text_config
    window_and_chunk = (
        config.sliding_window + vllm_config.scheduler_config.max_num_batched_tokens
    )
    most = 2**31 // config.head_dim - window_and_chunk
    if vllm_config.model_config.max_model_len <= most:
        return None
    return (
        f"--max-model-len must be at most {most}, the entries of a request would not "
        "fit into the buffer of prefill. Lower it, or --max-num-batched-tokens."
    )


def pipeline_stages(vllm_config: "VllmConfig") -> str | None:
    """A stage's layers read entries and choices that layers of the same stage wrote."""
    config = vllm_config.model_config.hf_text_config
    sources = config.kv_source_layer_ids
    for start in stage_starts(vllm_config):
        compressed = (
            layer
            for layer in range(start, config.num_hidden_layers)
            if config.compress_ratios[layer]
        )
        first = next(compressed, None)
        if first is not None and first not in sources:
            return (
                f"a pipeline stage that begins at layer {start} would read the cache "
                f"of an earlier one. Use VLLM_PP_LAYER_PARTITION so that stages begin "
                f"at one of the layers {sources}."
            )
        candidates = config.candidate_source_layer_id
        later = any(layer >= start for layer in config.index_source_layer_ids)
        if 0 <= candidates < start and later:
            return (
                f"a pipeline stage that begins at layer {start} would keep to blocks "
                f"that layer {candidates} chose in an earlier one. Use fewer stages, "
                f"or VLLM_PP_LAYER_PARTITION so that the last begins at layer "
                f"{candidates} or before."
            )
    return None


CHECKS = (
    experts,
    speculation,
    model_runner,
    connectors,
    prompt_embeds,
    data_parallel,
    gathered_rows,
    pipeline_stages,
)
"""Each gives the reason why a start is refused, or None."""
