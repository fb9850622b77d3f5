# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a server of DeepSeek V4 or V4.1 may be asked for."""

from typing import TYPE_CHECKING

import torch

from vllm_xpu_dsv4.ranks import hash_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_SIZES = {"deepseek_v4": 256, "deepseek_v41": 128}
"""Tokens of a block of the KV cache: 64 entries at ratio 4, 2 at ratio 128. V4.1: 128
entries at ratio 1, 64 at ratio 2."""

CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_ds_mla")
"""Names of the one type of key that a page holds."""


def dtype(vllm_config: "VllmConfig") -> str | None:
    dtype = vllm_config.model_config.dtype
    if dtype == torch.bfloat16:
        return None
    return (
        f"dtype {str(dtype).removeprefix('torch.')} is not supported, its kernels "
        "take bfloat16 alone. Use --dtype bfloat16."
    )


def quantization(vllm_config: "VllmConfig") -> str | None:
    if vllm_config.model_config.quantization is not None:
        return None
    return (
        "a checkpoint that is not quantized is not supported, it has no tested experts "
        "in 16 bits. Use DeepSeek's own checkpoints: FP8 in blocks, with experts in "
        "MXFP4 or FP8."
    )


def cache_dtype(vllm_config: "VllmConfig") -> str | None:
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype in CACHE_DTYPES:
        return None
    return (
        f"--kv-cache-dtype {cache_dtype} is not supported, a page holds e4m3 keys "
        "with their scales. Use --kv-cache-dtype fp8."
    )


def block_size(vllm_config: "VllmConfig") -> str | None:
    cache_config = vllm_config.cache_config
    if not cache_config.user_specified_block_size:
        return None
    needed = BLOCK_SIZES[vllm_config.model_config.hf_text_config.model_type]
    if cache_config.block_size == needed:
        return None
    return (
        f"--block-size {cache_config.block_size} is not supported, the compressed "
        f"caches take blocks of {needed} tokens. Use --block-size {needed}."
    )


def draft(vllm_config: "VllmConfig") -> str | None:
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


def prompt_embeds(vllm_config: "VllmConfig") -> str | None:
    model_config = vllm_config.model_config
    choosing = hash_layers(model_config.hf_text_config)
    if not (model_config.enable_prompt_embeds and choosing):
        return None
    return (
        f"--enable-prompt-embeds is not supported, the first {choosing} layers "
        "choose experts by token id, which embeddings lack. Drop it and send text or "
        "token ids."
    )


def lora(vllm_config: "VllmConfig") -> str | None:
    if vllm_config.lora_config is None:
        return None
    return (
        "LoRA (--enable-lora) is not supported, no experts on XPU take adapters. "
        "Drop it, and merge the adapter into the checkpoint."
    )


def adaptive_verification(vllm_config: "VllmConfig") -> str | None:
    speculation = vllm_config.speculative_config
    if not getattr(speculation, "enable_adaptive_verification", False):
        return None
    return (
        "enable_adaptive_verification is not supported, the draft model has no "
        "confidence head and decode graphs take equal lengths alone. Drop it from "
        "--speculative-config."
    )


def images(vllm_config: "VllmConfig") -> str | None:
    """What splits an image, whose tokens see each other, or reads logits of a rank."""
    if not getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
        return None
    options = {
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "--enable-batch-sharded-sampling": bool(
            vllm_config.parallel_config.enable_batch_sharded_sampling
        ),
    }
    for option, given in options.items():
        if given:
            return (
                f"{option} is not supported with images. Drop it, or serve text alone "
                """with --limit-mm-per-prompt '{"image": 0}'."""
            )
    return None
