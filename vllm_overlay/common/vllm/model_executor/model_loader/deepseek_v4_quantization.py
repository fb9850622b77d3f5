# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `config.json` of a checkpoint of DeepSeek-V4 says of its quantization."""

from fnmatch import fnmatch
from typing import Any

import regex as re

NOT_CONVERTED = ("ignore", "exclude_modules")


def quantization_of(config: Any) -> dict[str, Any]:
    """What `config.json` says of the quantization, under either of its names."""
    for name in ("quantization_config", "compression_config"):
        if found := getattr(config, name, None):
            return found
    return {}


def kept_layers(quantization: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    """The names or patterns of layers that a quantization leaves alone."""
    nested = quantization.get("quantization") or {}
    return [
        name
        for described in (quantization, nested)
        for key in keys
        for name in described.get(key) or ()
    ]


def is_kept(layer: str, kept: list[str]) -> bool:
    """Whether a layer is among those: by name, by a part of it, or by a pattern, in
    shell's form or after `re:` as a regular expression."""
    for name in kept:
        if name.startswith("re:"):
            if re.match(name.removeprefix("re:"), layer):
                return True
            continue
        plain = name.removeprefix("model.")
        if fnmatch(layer, plain) or fnmatch(layer, f"{plain}.*"):
            return True
        if f".{plain.strip('*.')}." in f".{layer}.":
            return True
    return False


def keeps_draft_experts(quantization: dict[str, Any], stage: int) -> bool:
    """Whether a conversion left the routed experts of a stage of the draft model, which
    the checkpoint calls `mtp.{stage}`, as DeepSeek publishes them."""
    experts = f"mtp.{stage}.ffn.experts"
    kept = kept_layers(quantization, NOT_CONVERTED)
    return is_kept(experts, kept) or is_kept(f"{experts}.0.w1", kept)


def draft_experts_config(quant_config: Any, config: Any, stage: int) -> Any:
    """The quantization config for the routed experts of a stage of the draft model:
    without `moe_quant_algo` where a conversion of the others left them in MXFP4."""
    converted = getattr(quant_config, "moe_quant_algo", "")
    if converted and keeps_draft_experts(quantization_of(config), stage):
        return quant_config.without_moe_quant_algo()
    return quant_config
