# SPDX-License-Identifier: Apache-2.0
"""What a start makes of V4.1's checkpoint whose tensors are all there, but whose values
or whose config.json are not those that are published."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_v41 import KIND, SERVER

from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt

pytestmark = [pytest.mark.newest, pytest.mark.full]
JOB = Job("v4.1, other values", ((Prompt(20, 3, seed=3),),), SERVER, checkpoint=KIND)
Change = Callable[[Path], None]


@pytest.fixture(autouse=True)
def release_that_has_it(engines: Engines, release: str) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")


def changed(engines: Engines, name: str, change: Change) -> Job:
    """A job of a copy of the checkpoint, after `change` of its folder."""
    published, twin = engines.written(KIND)
    folder = engines.work / name.replace(" ", "-")
    if not folder.is_dir():
        shutil.copytree(published, folder)
        change(folder)
    engines._checkpoints[f"v4.1, {name}"] = folder, twin
    return replace(JOB, name=f"v4.1, {name}", checkpoint=f"v4.1, {name}")


def fewer_rows(folder: Path) -> None:
    file = folder / "config.json"
    described = json.loads(file.read_text())
    text = described["text_config"]
    text["engram_num_embeddings"] = [n - 300 for n in text["engram_num_embeddings"]]
    file.write_text(json.dumps(described))


def float32_scales(factor: float) -> Change:
    """Of all linear layers."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            linear = ".attn." in name or ".shared_experts." in name
            if linear and tensor.dtype == torch.float8_e8m0fnu:
                tensors[name] = tensor.float() * factor
        save_file(tensors, file, {"format": "pt"})

    return change


def refusal(engines: Engines, release: str, job: Job) -> str:
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, job)
    return str(stopped.value)


def test_too_few_rows_of_a_table_are_named(engines: Engines, release: str) -> None:
    said = refusal(engines, release, changed(engines, "few rows", fewer_rows))
    assert "engram_num_embeddings[0] is " in said


def test_float32_scales_give_the_same_tokens(engines: Engines, release: str) -> None:
    found = engines.serve(
        release, changed(engines, "float32 scales", float32_scales(1.0))
    )
    assert found.new_tokens() == engines.serve(release, JOB).new_tokens()


def test_scales_between_powers_of_two_are_named(engines: Engines, release: str) -> None:
    job = changed(engines, "other scales", float32_scales(1.1))
    said = refusal(engines, release, job)
    assert ".scale is float32 but not all powers of two" in said
