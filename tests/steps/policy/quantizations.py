# SPDX-License-Identifier: Apache-2.0
"""A start refuses a quantization that XPU has no kernels for."""

from pathlib import Path
from typing import Any

import pytest
from helpers import layout, quantizations
from helpers.quantizations import GPTQ, compressed

from . import starts

MODELOPT: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": []}
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True}
LOADING = "quantizing weights while they are loaded"
KINDS = quantizations.KINDS


def modelopt(name: str, algorithm: str) -> dict[str, Any]:
    return {"quant_method": name, "quantization": {"quant_algo": algorithm} | MODELOPT}


def auto_round(**options: Any) -> dict[str, Any]:
    packing = {"quant_method": "inc", "packing_format": "auto_round:auto_gptq"}
    return packing | GPTQ | options


# Of each kind: what the checkpoint or the user says, and what the message names.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "INT8": (
        compressed(8, "int", "channel", {**INT8, "dynamic": True}),
        "Linear in compressed-tensors' int8 by channel with activations by token",
    ),
    "FP8 of one scale": (
        compressed(8, "float", "tensor"),
        "Linear in compressed-tensors' float8 by tensor with activations as they are",
    ),
    "FP8 by rows, static activations": (
        compressed(
            *(8, "float", "channel"),
            {**INT8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        "float8 by channel with activations by tensor",
    ),
    "experts in MXFP8": (
        quantizations.MXFP8,
        # Where linear layers are served, only the experts are left to refuse.
        f"{'RoutedExperts' if KINDS['MXFP8'][1] else 'Linear'} in compressed-tensors' "
        "float8 by group with activations by group",
    ),
    "FP8 by 32": (
        compressed(8, "float", "group", quantizations.BY_GROUP, group_size=32),
        "Linear in compressed-tensors' float8 by group",
    ),
    "bytes by 128": (
        compressed(
            *(8, "float", "group", quantizations.BY_GROUP),
            **{"group_size": 128, "scale_dtype": "torch.uint8"},
        ),
        "Linear in compressed-tensors' float8 by group",
    ),
    "INT4 of one group": (compressed(4, "int", "channel"), "int4 by channel"),
    "asymmetric INT4": (
        compressed(4, "int", "group", group_size=128, symmetric=False),
        "asymmetric int4 by group",
    ),
    "FP8 of one scale by its own name": (
        {"quant_method": "deepseek_v4_fp8", "activation_scheme": "dynamic"},
        "not support FP8 without weight_block_size:",
    ),
    "FP8 by ModelOpt": (modelopt("modelopt", "FP8"), "not support modelopt:"),
    "FP8 by rows by ModelOpt": (
        modelopt("modelopt", "FP8_PER_CHANNEL_PER_TOKEN"),
        "not support modelopt:",
    ),
    "MXFP8 by ModelOpt": (
        modelopt("modelopt_mxfp8", "MXFP8"),
        "not support modelopt_mxfp8:",
    ),
    "mixed by ModelOpt": (
        {
            "quant_method": "modelopt_mixed",
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"layers.0.attn.wq_b": {"quant_algo": "FP8"}},
                **MODELOPT,
            },
        },
        "not support modelopt_mixed:",
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        r"not support (auto_)?awq:",
    ),
    "FBGEMM": (
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1.0,
            "modules_to_not_convert": [],
        },
        "not support fbgemm_fp8:",
    ),
    "AutoRound, asymmetric": (auto_round(sym=False), "not support inc with sym False"),
    "AutoRound in AWQ's order": (
        auto_round(packing_format="auto_round:auto_awq"),
        "not support inc with packing_format auto_round:auto_awq",
    ),
    "moe_wna16": (
        {"quant_method": "gptq", **GPTQ},
        "not support moe_wna16:",
    ),
    "gpt_oss_mxfp4": ({"quant_method": "gpt_oss_mxfp4"}, "not support gpt_oss_mxfp4:"),
    "fp8_per_tensor": ({}, LOADING),
    "fp8_per_block": ({}, LOADING),
    "fp8_per_channel": ({}, LOADING),
    "int8_per_channel_weight_only": ({}, LOADING),
    "nvfp4_per_token": ({}, LOADING),
    "mxfp8": ({}, LOADING),
    "mxfp4": ({}, LOADING),
}
SHORTHANDS = layout.module("vllm.config.quantization")
NAMES = layout.module(layout.LAYER_QUANTIZATION).QUANTIZATION_METHODS


def quantized(kind: str) -> Any:
    """The configuration that a kind of `REFUSED` gives."""
    described, _ = REFUSED[kind]
    if described:
        return quantizations.config_of(described, kind if kind in NAMES else "")
    resolve = getattr(SHORTHANDS, "resolve_online_quant_config", None)
    arguments = (resolve or SHORTHANDS.resolve_quantization_config)(kind, None)
    if arguments is None:
        # A name that is also a checkpoint's is resolved once there is none.
        arguments = SHORTHANDS._ONLINE_SHORTHANDS[kind]
    online = layout.module(f"{layout.LAYER_QUANTIZATION}.online.base")
    return online.OnlineQuantizationConfig(arguments)


def is_known(kind: str) -> bool:
    """Whether this release has a method of that name, if the kind has a name, or can
    quantize by it while it loads."""
    _, message = REFUSED[kind]
    if message != LOADING:
        return True
    known = getattr(SHORTHANDS, "_ONLINE_SHORTHANDS", None)
    return kind in (known or [it.value for it in SHORTHANDS.OnlineQuantScheme])


def check(folder: Path, quant_config: Any, **described: Any) -> None:
    """Start a server of a checkpoint that is quantized in this way."""
    config = starts.configured(folder, {})
    config.quant_config = quant_config
    config.model_config.hf_config.quantization_config.update(described)
    starts.check_again(config)


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if is_known(kind)])
def test_the_start_says_what_and_why(kind: str, tmp_path: Path) -> None:
    _, message = REFUSED[kind]
    with pytest.raises(NotImplementedError, match=message) as refusal:
        check(tmp_path, quantized(kind))
    told = str(refusal.value)
    assert "Use DeepSeek's own checkpoints" in told
    listed = set(told.partition("also serves: ")[2].rstrip(".").split(", ")) - {""}
    served = {it for it in KINDS if KINDS[it][1]} - {"DeepSeek's own"}
    assert listed == {it.removesuffix(" by ModelOpt") for it in served}


def test_a_part_that_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    """Of a checkpoint that is quantized itself."""
    own = quantizations.config_of(KINDS["DeepSeek's own"][0])
    own.online_quantization_config = object()
    with pytest.raises(NotImplementedError, match=LOADING):
        check(tmp_path, own)


def nvidias_experts(folder: Path) -> None:
    """DeepSeek's own but for the experts."""
    own = quantizations.config_of(KINDS["DeepSeek's own"][0])
    check(folder, own, moe_quant_algo="NVFP4")


if KINDS["NVFP4"][1]:

    @pytest.mark.unchanged
    def test_experts_in_nvfp4_are_served(tmp_path: Path) -> None:
        nvidias_experts(tmp_path)

else:

    def test_experts_in_nvfp4_are_refused(tmp_path: Path) -> None:
        with pytest.raises(NotImplementedError, match="not support experts in NVFP4:"):
            nvidias_experts(tmp_path)


@pytest.mark.unchanged
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1]])
def test_what_has_kernels_is_served(kind: str, tmp_path: Path) -> None:
    check(tmp_path, quantizations.config_of(KINDS[kind][0]))


@pytest.mark.unchanged
def test_layers_may_be_named_one_by_one(tmp_path: Path) -> None:
    described = compressed(8, "float", "channel", quantizations.BY_TOKEN)
    described["config_groups"]["group_0"]["targets"] = ["re:.*wo_b"]
    check(tmp_path, quantizations.config_of(described))


LACKED = [kind for kind in KINDS if not KINDS[kind][1]]
if LACKED:

    @pytest.mark.parametrize("kind", LACKED)
    def test_what_only_other_releases_serve_is_refused(
        kind: str, tmp_path: Path
    ) -> None:
        with pytest.raises(NotImplementedError, match="DeepSeek-V4 on XPU does not"):
            check(tmp_path, quantizations.config_of(KINDS[kind][0]))
