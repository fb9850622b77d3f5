# SPDX-License-Identifier: Apache-2.0
"""Quantizations of a checkpoint as its `config.json` describes them, and which of them
this release has right experts and kernels for."""

from typing import Any

import torch

from . import layout, model_configs

SQUARES = {"block_structure": [128, 128]}
BY_GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": True,
}
BY_TOKEN = BY_GROUP | {"strategy": "token", "group_size": None}
BYTES_BY_32 = BY_GROUP | {"group_size": 32, "scale_dtype": "torch.uint8"}
FP4_BY_32 = BY_GROUP | {"num_bits": 4, "group_size": 32}
MODELOPT: dict[str, Any] = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": None,
    "group_size": 16,
    "exclude_modules": [],
}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compressed(
    bits: int, number: str, strategy: str, activations: Any = None, **weights: Any
) -> dict[str, Any]:
    """What compressed-tensors writes."""
    values = {"num_bits": bits, "type": number, "strategy": strategy, "dynamic": False}
    kind = "float-quantized" if number == "float" else "int-quantized"
    if bits == 4:
        kinds = {
            "group": "mxfp4-pack-quantized",
            "tensor_group": "nvfp4-pack-quantized",
        }
        kind = kinds[strategy] if number == "float" else "pack-quantized"
    if number == "float" and weights.get("scale_dtype"):
        kind = "mxfp8-quantized"
    group = {
        "targets": ["Linear"],
        "weights": {**values, "symmetric": True, **weights},
        "input_activations": activations,
        "format": kind,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def beside_experts(
    described: dict[str, Any], experts: dict[str, Any]
) -> dict[str, Any]:
    """The same with the routed experts of another description."""
    theirs = experts["config_groups"]["group_0"] | {"targets": ["RoutedExperts"]}
    groups = described["config_groups"] | {"group_1": theirs}
    return described | {"format": "mixed-precision", "config_groups": groups}


def config_of(described: dict[str, Any], name: str = "") -> Any:
    """What vLLM makes of it, by its name of the method: that in the description if
    none."""
    known = layout.module(layout.LAYER_QUANTIZATION)
    method = known.get_quantization_config(name or described["quant_method"])
    return method.from_config(described)


def _has_linear_kernel(described: dict[str, Any]) -> bool:
    config = model_configs.vllm_config()
    linear = layout.module("vllm.model_executor.layers.linear").ReplicatedLinear
    with model_configs.current(config):
        try:
            linear(128, 128, quant_config=config_of(described), prefix="wo_a")
        except ValueError:
            return False
    return True


_BLOCKS = compressed(8, "float", "block", BY_GROUP, **SQUARES)
_MXFP4 = compressed(4, "float", "group", FP4_BY_32, group_size=32)
MXFP8 = compressed(
    8, "float", "group", BYTES_BY_32, group_size=32, scale_dtype="torch.uint8"
)
_SINCE_31 = layout.RELEASE >= (0, 31)
# By kind: what `config.json` says, and whether this release serves it.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "DeepSeek's own": (
        {
            "quant_method": "deepseek_v4_fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        True,
    ),
    "FP8 by rows": (
        compressed(8, "float", "channel", BY_TOKEN),
        True,
    ),
    "FP8 in blocks": (_BLOCKS, _has_linear_kernel(_BLOCKS)),
    "NVFP4": (
        compressed(4, "float", "tensor_group", group_size=16),
        _SINCE_31,
    ),
    "NVFP4 by ModelOpt": (
        {"quant_method": "modelopt_fp4", "quantization": dict(MODELOPT)},
        _SINCE_31,
    ),
    "MXFP4": (_MXFP4, layout.WITH_XPU_FOLDER),
    "MXFP8": (
        beside_experts(MXFP8, _MXFP4),
        # Before, its kernel makes no operands of wo_a's batched product.
        _SINCE_31,
    ),
    "INT4": (compressed(4, "int", "group", group_size=128), layout.WITH_XPU_FOLDER),
    "experts in MXFP4": (
        {"quant_method": "mxfp4"},
        # Before, they were those of gpt-oss, with another activation.
        _SINCE_31,
    ),
    "AutoRound": (
        {"quant_method": "inc", "packing_format": "auto_round:auto_gptq", **GPTQ},
        _SINCE_31,
    ),
    "GPTQ": (
        {"quant_method": "gptq", **GPTQ},
        _SINCE_31,
    ),
}


def stored(kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A layer as it is published in this kind, a scale for each 128 of INT4."""
    codes = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    words = torch.zeros(columns // 8, rows, dtype=torch.int32)
    sixteens = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    groups = torch.ones(columns // 128, rows).half()
    zeros = torch.full((len(groups), rows // 8), 0x77777777, dtype=torch.int32)
    fp8, one = torch.ones(rows, columns).to(torch.float8_e4m3fn), torch.tensor(0.5)
    gptq = {"qweight": words, "qzeros": zeros, "scales": groups}
    return {
        "FP8 by rows": {"weight": fp8, "weight_scale": torch.ones(rows, 1).bfloat16()},
        "FP8 in blocks": {
            "weight": fp8,
            "weight_scale": torch.ones(rows // 128, columns // 128),
        },
        "NVFP4": {
            "weight_packed": codes,
            "weight_scale": sixteens,
            "weight_global_scale": one.view(1),
            "input_global_scale": one.view(1),
        },
        "NVFP4 by ModelOpt": {
            "weight": codes,
            "weight_scale": sixteens,
            "weight_scale_2": one,
            "input_scale": one,
        },
        "MXFP4": {
            "weight_packed": codes,
            "weight_scale": torch.full((rows, columns // 32), 120).byte(),
        },
        "MXFP8": {
            "weight": fp8,
            "weight_scale": torch.full((rows, columns // 32), 120).byte(),
        },
        "INT4": {
            "weight_packed": words.T,
            "weight_scale": groups.T.bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        },
        # Of either sign.
        "AutoRound": gptq | {"scales": -groups},
        "GPTQ": gptq | {"g_idx": torch.arange(columns, dtype=torch.int32) // 128},
    }[kind]
