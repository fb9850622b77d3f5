# SPDX-License-Identifier: Apache-2.0
"""A draft reads its own tensors of the checkpoint, and not those of the target."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers
from helpers.pipeline_stages import stage
from safetensors.torch import save_file

EMBEDDING = {"embed.weight": torch.ones(128, 256)}
TARGET = {"layers.0.attn.wq_b.weight": torch.ones(4096, 128)}
DRAFT = {"mtp.0.attn_norm.weight": torch.ones(256)}


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def bytes_read(draft: Any, folder: Path, own: dict[str, torch.Tensor] = DRAFT) -> int:
    """What the loader reads for `draft` of a checkpoint of three shards, of which the
    last has its `own` tensors."""
    for number, shard in enumerate((EMBEDDING, TARGET, own), start=1):
        save_file(shard, folder / f"model-{number:05}-of-00003.safetensors")
    kind = layout.module("vllm.model_executor.model_loader.default_loader")
    loader = kind.DefaultModelLoader(model_configs.vllm_config().load_config)
    source = SimpleNamespace(model=str(folder), revision=None)
    return size(dict(loader.get_all_weights(source, draft)))


def test_mtp_reads_its_own(tmp_path: Path) -> None:
    config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    assert bytes_read(model_layers.draft_model(config), tmp_path) == size(DRAFT)


def test_mtp_reads_its_own_under_the_numbers_of_layers(tmp_path: Path) -> None:
    config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    draft = model_layers.draft_model(config)
    number = draft.config.num_hidden_layers
    own = {f"model.layers.{number}.attn_norm.weight": torch.ones(256)}
    assert bytes_read(draft, tmp_path, own) == size(own)


def test_over_stages_mtp_reads_the_embedding_too(tmp_path: Path) -> None:
    config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    draft = model_layers.draft_model(config)
    with stage(1, 2):
        assert bytes_read(draft, tmp_path) == size(DRAFT) + size(EMBEDDING)


def test_dspark_reads_its_own(tmp_path: Path) -> None:
    kind = layout.module(layout.DSPARK).DSparkDeepseekV4ForCausalLM
    assert bytes_read(kind.__new__(kind), tmp_path) == size(DRAFT)


@pytest.mark.unchanged
def test_a_model_without_the_rule_reads_all(tmp_path: Path) -> None:
    assert bytes_read(torch.nn.Module(), tmp_path) == size(
        {**EMBEDDING, **TARGET, **DRAFT}
    )
