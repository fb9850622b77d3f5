# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The checks of a start, of which each gives the reason why it is refused, or None."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm_xpu_dsv4 import SWITCH, connectors, options, quantization, ranks, v41
from vllm_xpu_dsv4.load_formats import check_checkpoint
from vllm_xpu_dsv4.tensor_names import tensor_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.plugins.xpu_dsv4")

CHECKED = "xpu_dsv4_checked"
"""Of `additional_config`, which vLLM keeps for platforms and takes along where it makes
the configuration of a draft."""
MODELS = {"deepseek_v4": "DeepSeek V4", "deepseek_v41": "DeepSeek V4.1"}
Check = Callable[["VllmConfig"], str | None]
V4_CHECKS: tuple[Check, ...] = (
    options.dtype,
    options.quantization,
    options.cache_dtype,
    options.block_size,
    ranks.tensor_parallel_size,
    ranks.pipeline_parallel_size,
    ranks.decode_context_parallel_size,
    ranks.prefill_context_parallel_size,
    ranks.microbatches,
    options.draft,
    tensor_names,
    ranks.expert_placement,
    connectors.kv_connector,
    connectors.nixl,
    options.prompt_embeds,
    options.lora,
    options.adaptive_verification,
    options.images,
)
V41_CHECKS: tuple[Check, ...] = (
    options.dtype,
    options.quantization,
    options.cache_dtype,
    options.block_size,
    ranks.tensor_parallel_size,
    ranks.decode_context_parallel_size,
    ranks.prefill_context_parallel_size,
    ranks.expert_placement,
    options.lora,
    *v41.CHECKS,
)


def model_of(vllm_config: "VllmConfig") -> str | None:
    """The name of the model, if it is one that this package knows."""
    config = vllm_config.model_config
    if config is None:
        return None
    return MODELS.get(getattr(config.hf_text_config, "model_type", ""))


def check_start(vllm_config: "VllmConfig") -> None:
    """Refuse what the model cannot serve; other models pass.

    A KV cache whose type is left to vLLM becomes FP8, the only type there is. What was
    checked passes: a draft model's configuration is made from the target's, may have
    another KV cache, and comes by here again.

    Raises:
        ValueError: with the option, the reason, and what to use instead.
        NotImplementedError: the same of experts that move, and of a quantization.

    """
    model, given = model_of(vllm_config), vllm_config.additional_config
    if model is None or (isinstance(given, dict) and CHECKED in given):
        return
    logger.info_once(
        "%s: options that XPU cannot serve are refused. %s=0 starts without checks.",
        model,
        SWITCH,
    )
    if vllm_config.cache_config.cache_dtype == "auto":
        vllm_config.cache_config.cache_dtype = "fp8"
    for reason_of in V4_CHECKS if model == "DeepSeek V4" else V41_CHECKS:
        if reason := reason_of(vllm_config):
            raise ValueError(f"{model} on XPU: {reason}")
    if model == "DeepSeek V4":
        ranks.check_balanced_experts(vllm_config)
        quantization.check_quantization(vllm_config)
    check_checkpoint(vllm_config)
    if isinstance(given, dict):
        vllm_config.additional_config = given | {CHECKED: True}
