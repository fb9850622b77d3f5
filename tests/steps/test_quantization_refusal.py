# SPDX-License-Identifier: Apache-2.0
"""The start refuses a quantization that XPU has no kernels for, before it loads
weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fp8_rows, layout, model_configs, model_layers

MODELOPT: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": []}
ACTIVATIONS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "symmetric": True,
}

BLOCKS = {**ACTIVATIONS, "type": "float", "strategy": "group", "dynamic": True}
BLOCKS["group_size"] = 128
SQUARES = {"block_structure": [128, 128]}


def compressed(
    bits: int, number: str, strategy: str, activations: Any = None, **weights: Any
) -> tuple[str, dict[str, Any]]:
    """What compressed-tensors writes into `config.json`, with its name."""
    values = {"num_bits": bits, "type": number, "strategy": strategy, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**values, "symmetric": True, **weights},
        "input_activations": activations,
    }
    integers = "pack-quantized" if bits == 4 else "int-quantized"
    return "compressed-tensors", {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if number == "float" else integers,
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def modelopt(name: str, algorithm: str) -> tuple[str, dict[str, Any]]:
    return name, {"quantization": {"quant_algo": algorithm, **MODELOPT}}


# Of each kind: its name in vLLM, what the checkpoint says, and what the message names.
REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "INT8": (
        compressed(8, "int", "channel", {**ACTIVATIONS, "dynamic": True}),
        "Linear in compressed-tensors' int8 by channel with activations by token",
    ),
    "FP8 of one scale": (
        compressed(8, "float", "tensor"),
        "Linear in compressed-tensors' float8 by tensor with activations as they are",
    ),
    "FP8 by rows, static activations": (
        compressed(
            *(8, "float", "channel"),
            {**ACTIVATIONS, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        "float8 by channel with activations by tensor",
    ),
    "MXFP8": (compressed(8, "float", "group", group_size=32), "float8 by group"),
    "INT4 of one group": (compressed(4, "int", "channel"), "int4 by channel"),
    "asymmetric INT4": (
        compressed(4, "int", "group", group_size=128, symmetric=False),
        "asymmetric int4 by group",
    ),
    "FP8 of one scale by its own name": (
        ("deepseek_v4_fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
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
    "AWQ": (
        ("awq", {"bits": 4, "group_size": 128, "zero_point": True}),
        r"not support (auto_)?awq:",
    ),
    "mixed by ModelOpt": (
        (
            "modelopt_mixed",
            {
                "quantization": {
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {"layers.0.attn.wq_b": {"quant_algo": "FP8"}},
                    **MODELOPT,
                }
            },
        ),
        "not support modelopt_mixed:",
    ),
    "FBGEMM": (
        ("fbgemm_fp8", {"activation_scale_ub": 1.0, "modules_to_not_convert": []}),
        "not support fbgemm_fp8:",
    ),
}


class Nothing(torch.nn.Module):
    """In place of attention and experts, which have no part in this."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def build(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = layout.module(layout.MODEL)
    monkeypatch.setattr(model, model_layers.attention_class().__name__, Nothing)
    monkeypatch.setattr(model, "DeepseekV4MoE", Nothing)
    with model_configs.current(config):
        return model.DeepseekV4Model(vllm_config=config, prefix="model")


def quantized(name: str, described: dict[str, Any]) -> Any:
    config = model_configs.vllm_config()
    known = layout.module(layout.LAYER_QUANTIZATION)
    config.quant_config = known.get_quantization_config(name).from_config(described)
    return config


@pytest.mark.parametrize("kind", REFUSED)
def test_the_model_says_what_and_why(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, message = REFUSED[kind]
    with pytest.raises(NotImplementedError, match=message) as refusal:
        build(quantized(*described), monkeypatch)
    assert "Use DeepSeek's own checkpoints" in str(refusal.value)


def take(described: tuple[str, dict[str, Any]]) -> Callable[[Any], None]:
    def put(config: Any) -> None:
        config.quant_config = quantized(*described).quant_config

    return put


TRITON_CLAMPS = layout.mentions(
    "model_executor/layers/fused_moe/experts/triton_moe.py", "gemm1_clamp_limit"
)
# Of each kind: how a configuration takes it, and whether this release has experts that
# are right with it.
KINDS: dict[str, tuple[Callable[[Any], None], bool]] = {
    "DeepSeek's own": (lambda config: None, True),
    "AutoRound": (lambda config: model_configs.take_auto_round(config, []), True),
    "FP8 by rows": (
        lambda config: fp8_rows.take(config, "channel", "token"),
        TRITON_CLAMPS,
    ),
    "FP8 in blocks": (take(compressed(8, "float", "block", BLOCKS, **SQUARES)), True),
    "NVFP4 by ModelOpt": (
        lambda config: model_configs.take_nvfp4(config, []),
        layout.NEW,
    ),
    "NVFP4": (
        lambda config: model_configs.take_packed(config, "nvfp4-pack-quantized", []),
        layout.NEW,
    ),
    "MXFP4": (
        lambda config: model_configs.take_packed(config, "mxfp4-pack-quantized", []),
        layout.WITH_XPU_FOLDER,
    ),
    "INT4": (
        lambda config: model_configs.take_packed(config, "pack-quantized", []),
        layout.WITH_XPU_FOLDER,
    ),
    "GPTQ": (
        take(("gptq", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True})),
        layout.WITH_XPU_FOLDER,
    ),
}


@pytest.mark.unchanged
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1]])
def test_what_has_kernels_is_built(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_configs.vllm_config()
    KINDS[kind][0](config)
    assert build(config, monkeypatch).layers


LACKED = [kind for kind in KINDS if not KINDS[kind][1]]
if LACKED:

    @pytest.mark.parametrize("kind", LACKED)
    def test_what_only_later_releases_serve_is_refused(
        kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = model_configs.vllm_config()
        KINDS[kind][0](config)
        with pytest.raises(NotImplementedError, match="DeepSeek-V4 on XPU does not"):
            build(config, monkeypatch)


if not layout.WITH_XPU_FOLDER:  # one model for all platforms

    @pytest.mark.unchanged
    def test_other_platforms_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
        model = layout.module(layout.MODEL)
        another = layout.another_platform(model.current_platform)
        monkeypatch.setattr(model, "current_platform", another)
        monkeypatch.setattr(torch.cuda, "Stream", object)
        described, _ = REFUSED["INT8"]
        assert build(quantized(*described), monkeypatch).layers
