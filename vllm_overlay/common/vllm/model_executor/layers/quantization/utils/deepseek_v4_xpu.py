# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which quantizations DeepSeek-V4 runs with on XPU."""

from collections.abc import Collection

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_METHODS = (
    "auto_gptq",
    "compressed-tensors",
    "deepseek_v4_fp8",
    "fp8",
    "gptq",
    "gptq_marlin",
    "inc",
    "modelopt_fp4",
    "mxfp4",
)
# Of compressed-tensors: bits, type and strategy of the weights, and with them the
# strategies of the activations; None leaves activations as they are.
_SCHEMES: dict[tuple[int, str, str], tuple[str | None, ...]] = {
    (8, "float", "channel"): ("token", None),
    (8, "float", "block"): ("group",),
    (4, "float", "tensor_group"): ("tensor_group", None),
    (4, "float", "group"): ("group", None),
    (4, "int", "group"): (None,),
}


def check_quantization(
    quant_config: QuantizationConfig | None, without: Collection[object] = ()
) -> None:
    """Refuse, before weights are loaded, what stops later or is wrong on XPU.

    Args:
        quant_config: the checkpoint's, or what the user asks for.
        without: names of methods, and schemes of compressed-tensors as (bits, type,
            strategy), that this version of vLLM has no experts for.

    Raises:
        NotImplementedError: names the quantization, the reason and what to use.

    """
    if quant_config is None:
        return
    name = quant_config.get_name()
    if name not in _METHODS or name in without:
        raise _refusal(name)
    blocks = getattr(quant_config, "weight_block_size", None)
    if name in ("deepseek_v4_fp8", "fp8") and not blocks:
        raise _refusal("FP8 without weight_block_size")
    schemes = getattr(quant_config, "target_scheme_map", {})
    for target, scheme in schemes.items():
        weights, acts = scheme["weights"], scheme["input_activations"]
        kind = weights.num_bits, str(weights.type), str(weights.strategy)
        by = str(acts.strategy) if acts else None
        served = by in _SCHEMES.get(kind, ()) and weights.symmetric
        if kind in without or not served:
            bits, number, strategy = kind
            symmetric = "" if weights.symmetric else "asymmetric "
            raise _refusal(
                f"{target} in compressed-tensors' {symmetric}{number}{bits} by "
                f"{strategy} with activations {f'by {by}' if by else 'as they are'}"
            )


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"DeepSeek-V4 on XPU does not support {what}: it has no tested kernel for such "
        "an output projection (wo_a) or such experts. Use DeepSeek's own checkpoints: "
        "FP8 in blocks, with experts in MXFP4 or FP8."
    )
