# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a checkpoint calls its tensors."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TRANSFORMERS = (".self_attn.", ".hc_head.", "lm_head.")
"""In names of tensors: of classes of Transformers alone."""


def tensor_names(vllm_config: "VllmConfig") -> str | None:
    """Transformers saves tensors under other names than DeepSeek's, some of them also
    where it is asked for the original format."""
    for name in _names_in_checkpoint(vllm_config):
        if any(part in name for part in TRANSFORMERS):
            break
    else:
        return None
    return (
        f"a checkpoint that Transformers saved is not supported, {name} is not a name "
        "of DeepSeek's. Use a checkpoint in DeepSeek's own format, such as "
        "deepseek-ai/DeepSeek-V4-Flash."
    )


def _names_in_checkpoint(vllm_config: "VllmConfig") -> Iterator[str]:
    """By the index of its files, or else by the headers of local files. Those that
    cannot be read are left to the loader, which says more about them."""
    from safetensors import SafetensorError, safe_open

    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    model, revision = vllm_config.model_config.model, vllm_config.model_config.revision
    index = get_hf_file_to_dict("model.safetensors.index.json", model, revision)
    if index is not None:
        yield from index.get("weight_map", ())
        return
    for file in Path(model).glob("*.safetensors"):
        with suppress(SafetensorError), safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()
