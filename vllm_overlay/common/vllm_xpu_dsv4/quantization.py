# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which quantizations DeepSeek-V4 runs with on XPU."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_xpu_dsv4.releases import QUANTIZATIONS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_OWN = ("deepseek_v4_fp8", "fp8")
# Of compressed-tensors: bits, type and strategy of the weights, and with them the
# strategies of the activations; None leaves activations as they are.
_SCHEMES: dict[tuple[int, str, str], tuple[str, tuple[str | None, ...]]] = {
    (8, "float", "channel"): ("FP8 by rows", ("token", None)),
    (8, "float", "block"): ("FP8 in blocks", ("group",)),
    (8, "float", "group"): ("MXFP8", ("group",)),
    (4, "float", "tensor_group"): ("NVFP4", ("tensor_group", None)),
    (4, "float", "group"): ("MXFP4", ("group", None)),
    (4, "int", "group"): ("INT4", (None,)),
}
_MX_GROUP = 32
_METHODS = {
    "auto_gptq": "GPTQ",
    "inc": "AutoRound",
    "modelopt_fp4": "NVFP4",
    "mxfp4": "experts in MXFP4",
}
_UNTESTED = (
    "XPU has no tested kernel for such an output projection (wo_a) or such experts"
)


def check_quantization(vllm_config: "VllmConfig") -> None:
    """Refuse what stops later or is wrong on XPU, of the checkpoint or of the user.

    Raises:
        NotImplementedError: The message names the quantization, the reason and what
            to use.

    """
    described = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    for kind, called in _kinds_of(vllm_config.quant_config, described or {}):
        if kind not in QUANTIZATIONS:
            others = ", ".join(QUANTIZATIONS)
            raise NotImplementedError(
                f"DeepSeek-V4 on XPU does not support {called}: {_UNTESTED}. Use "
                "DeepSeek's own checkpoints: FP8 in blocks, with experts in MXFP4 or "
                f"FP8. This version of vLLM also serves: {others}."
            )


def _kinds_of(
    quant_config: "QuantizationConfig", described: dict[str, Any]
) -> Iterator[tuple[str | None, str]]:
    """The kinds that must be served, None of what no version serves, each with what
    the message calls it.

    Args:
        quant_config: What vLLM makes of it.
        described: What `config.json` says of it.

    """
    name = quant_config.get_name()
    online = getattr(quant_config, "online_quantization_config", None)
    if name == "online" or online is not None:
        yield None, "quantizing weights while they are loaded (--quantization)"
    elif name in _OWN:
        if not getattr(quant_config, "weight_block_size", None):
            yield None, "FP8 without weight_block_size"
        if (described.get("moe_quant_algo") or "").upper() == "NVFP4":
            yield "NVFP4", "experts in NVFP4"
    elif name == "compressed-tensors":
        schemes = dict(getattr(quant_config, "target_scheme_map", {}))
        if "Linear" in schemes and not any(map(_has_experts, schemes)):
            # As vLLM does when it makes the first layer.
            schemes["RoutedExperts"] = schemes["Linear"]
        for target, scheme in schemes.items():
            yield _kind_of_scheme(target, scheme)
    else:
        other = _other_than_int4(quant_config)
        yield None if other else _METHODS.get(name), f"{name}{other}"


def _kind_of_scheme(target: str, scheme: dict[str, Any]) -> tuple[str | None, str]:
    weights, acts = scheme["weights"], scheme["input_activations"]
    bits, number, strategy = weights.num_bits, str(weights.type), str(weights.strategy)
    by = str(acts.strategy) if acts else None
    kind, activations = _SCHEMES.get((bits, number, strategy), (None, ()))
    if kind == "MXFP8" and (_has_experts(target) or not _is_e8m0(weights)):
        kind = None  # Nobody ran experts in MXFP8.
    symmetric = "" if weights.symmetric else "asymmetric "
    return kind if by in activations and weights.symmetric else None, (
        f"{target} in compressed-tensors' {symmetric}{number}{bits} by {strategy} "
        f"with activations {f'by {by}' if by else 'as they are'}"
    )


def _has_experts(target: str) -> bool:
    """Whether a target of compressed-tensors names routed experts."""
    return "experts" in target.lower().replace("shared_experts", "")


def _is_e8m0(weights: Any) -> bool:
    """Whether each 32 weights have a scale in E8M0, as vLLM tells MXFP8."""
    is_byte = getattr(weights, "scale_dtype", None) == torch.uint8
    return is_byte and weights.group_size == _MX_GROUP


def _other_than_int4(quant_config: "QuantizationConfig") -> str:
    """How a method of integers differs from what was run: symmetric INT4 in GPTQ's
    order, columns in theirs."""
    run = {
        "weight_bits": 4,
        "sym": True,
        "is_sym": True,
        "desc_act": False,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
    }
    for option, value in run.items():
        found = getattr(quant_config, option, value)
        if found != value:
            return f" with {option} {found}"
    return ""
