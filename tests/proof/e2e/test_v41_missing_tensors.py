# SPDX-License-Identifier: Apache-2.0
"""A start names the tensor that its checkpoint lacks, or has with another shape or
type, whichever it is, of V4.1, of its draft and of its tower."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_v41 import KIND, SERVER
from test_v41_vision import SERVER as WITH_IMAGES

from proof.e2e.checkpoints import dspark
from proof.e2e.inside.lacking import LOST
from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt

pytestmark = [pytest.mark.newest, pytest.mark.full]
DRAFTS = {"method": "dspark", "num_speculative_tokens": dspark.BLOCK}
JOB = Job(
    "v4.1, each tensor lost", ((Prompt(20, 2, seed=3),),), SERVER, checkpoint=KIND
)
DRAFTED = replace(
    JOB,
    name="v4.1 with drafts, each tensor lost",
    engine=(*SERVER, ("speculative_config", DRAFTS)),
)
SEEING = replace(
    JOB,
    name="v4.1 with images, each tensor lost",
    engine=WITH_IMAGES,
    checkpoint="v4.1 with images",
)
STARTED = (
    "layers.1.engram.embed.scale",
    "layers.5.attn.attn_sink",
    "layers.1.attn.compressor.wgate.weight",
)


@pytest.fixture(autouse=True)
def release_that_has_it(engines: Engines, release: str) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")


@pytest.mark.parametrize("job", [DRAFTED, SEEING], ids=lambda job: job.name)
def test_each_damaged_tensor_is_named(engines: Engines, release: str, job: Job) -> None:
    found = engines.lacking(release, job)
    assert len(found) == (2 if job is DRAFTED else 1), found.keys()
    published = load_file(engines.written(job.checkpoint)[0] / "model.safetensors")
    read = set().union(*(of_model[LOST] for of_model in found.values()))
    # Without images nothing reads the tower, without drafts nothing the draft.
    # The engine takes no confidence from the draft.
    unread = ["confidence_head."]
    unread += ["mtp."] if job is SEEING else ["vision.", "aligner.", "image_"]
    assert {n for n in published if not any(u in n for u in unread)} <= read
    unnoticed = [
        f"{name}, {damage}"
        for of_model in found.values()
        for damage, said in of_model.items()
        for name, message in said.items()
        if not message
    ]
    assert not unnoticed, f"{len(unnoticed)}: {unnoticed[:20]}"


def without(source: Path, folder: Path, name: str) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", STARTED)
def test_a_start_names_it(engines: Engines, release: str, name: str) -> None:
    published, twin = engines.written(KIND)
    kind = f"v4.1 without {name}"
    engines._checkpoints[kind] = (
        without(published, engines.work / f"without-{name}", name),
        twin,
    )
    job = replace(JOB, name=kind, checkpoint=kind)
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, job)
    assert name.rpartition(".")[0] in str(stopped.value)
