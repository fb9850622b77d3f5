# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of checkpoints without their values."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks.memory import FLASH, PRO, Model
from e2e import checkpoint
from xpustack.plan.asked import _headers
from xpustack.plan.programs import shapes

PUBLISHED = tomllib.loads(Path("tests/e2e/published.toml").read_text())["kinds"]
TYPES = {dtype: name for name, dtype in shapes.DTYPES.items()}


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_names_and_types_are_the_published_ones(name: str):
    _, tensors = shapes.published(name)
    general = {
        re.sub(r"(?<=\.)\d+(?=\.)", "*", key): TYPES[tensor.dtype]
        for key, tensor in tensors.items()
    }
    assert general == PUBLISHED["flash"]["tensors"]


@pytest.mark.parametrize("model", [FLASH, PRO])
def test_ratios_are_those_of_the_arithmetic(model: Model):
    ratios = shapes.ratios(model)
    counts = [ratios.count(ratio) for ratio in (0, 4, 128)]
    assert counts == [model.plain, model.by4, model.by128]


def test_a_written_checkpoint_has_these_shapes(tmp_path: Path):
    folder, _ = checkpoint.write(tmp_path)
    rows = _headers(folder / "model.safetensors")
    writer = shapes.Writer(checkpoint.FLASH)
    checkpoint.whole_model(writer)
    found = shapes.listed(str(folder), rows)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in writer.published.items()
    }
    lacking = [row for row in rows if row[0] != "layers.1.attn.wkv.scale"]
    with pytest.raises(ValueError, match=r"no layers\.1\.attn\.wkv\.scale"):
        shapes.listed(str(folder), lacking)


def test_experts_are_complete_and_alike():
    zero = shapes.zeros(torch.int8, (2, 4))
    whole = {f"layers.0.ffn.experts.{n}.w1.weight": zero for n in range(4)}
    assert [name[-11:] for name, _ in shapes.loadable(whole, 4)] == [
        "0.w1.weight",
        "3.w1.weight",
    ]
    with pytest.raises(ValueError, match=r"no layers\.0\.ffn\.experts\.4"):
        list(shapes.loadable(whole, 5))
    odd = whole | {"layers.0.ffn.experts.2.w1.weight": zero[:1]}
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight is .*\(1, 4\)"):
        list(shapes.loadable(odd, 4))
