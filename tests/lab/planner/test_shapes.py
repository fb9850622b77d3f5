# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of checkpoints without their values."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from lab.memory import FLASH, PRO, Model
from lab.planner.checkpoints import NAMED, headers
from lab.planner.programs import shapes
from proof.e2e.checkpoints import checkpoint

PUBLISHED = tomllib.loads(Path("tests/proof/e2e/published.toml").read_text())["kinds"]
TYPES = {dtype: name for name, dtype in shapes.DTYPES.items()}


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_names_and_types_are_the_published_ones(name: str, tmp_path: Path):
    _, tensors = shapes.published(name, tmp_path)
    general = {
        re.sub(r"(?<=\.)\d+(?=\.)", "*", key): TYPES[tensor.dtype]
        for key, tensor in tensors.items()
    }
    assert general == PUBLISHED["flash"]["tensors"]


def test_v41_is_as_large_as_it_is_published(tmp_path: Path):
    """552 billion weights, tables of 768 million rows, 510 GB, of which tower and
    tokenizer are small ones here."""
    config, tensors = shapes.published("v4.1", tmp_path)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert 508e9 < stored < 511e9
    assert sum(config["text_config"]["engram_num_embeddings"]) // 10**6 == 768
    weights = sum(
        tensor.numel() * (2 if tensor.dtype == torch.int8 else 1)
        for name, tensor in tensors.items()
        if name.startswith(("layers.", "embed.", "head."))
        and not name.endswith("scale")
        and ".engram." not in name
    )
    assert round(weights / 1e9) == 552
    assert (tmp_path / "tokenizer.json").is_file()
    again = shapes.V41Of(config)
    checkpoint.whole_model(again)
    text = [name for name in tensors if not name.startswith(shapes.UNREAD)]
    assert set(text) <= set(again.published)


@pytest.mark.parametrize("model", [FLASH, PRO])
def test_ratios_are_those_of_the_arithmetic(model: Model):
    ratios = model.ratios
    counts = [ratios.count(ratio) for ratio in (0, 4, 128)]
    assert counts == [model.plain, model.by4, model.by128]


def test_a_written_checkpoint_has_these_shapes(tmp_path: Path):
    folder, _ = checkpoint.write(tmp_path)
    rows = headers(folder / "model.safetensors")
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
    four, five = ({"n_routed_experts": n} for n in (4, 5))
    assert [name[-11:] for name, _ in shapes.loadable(whole, four, False)] == [
        "0.w1.weight",
        "3.w1.weight",
    ]
    with pytest.raises(ValueError, match=r"no layers\.0\.ffn\.experts\.4"):
        list(shapes.loadable(whole, five, False))
    odd = whole | {"layers.0.ffn.experts.2.w1.weight": zero[:1]}
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight is .*\(1, 4\)"):
        list(shapes.loadable(odd, four, False))


def test_a_draft_is_loadable_where_it_is_asked_for(tmp_path: Path):
    config, tensors = shapes.published("v4.1", tmp_path)
    text = config["text_config"]
    without, drafting = (
        {name for name, _ in shapes.loadable(tensors, text, drafts)}
        for drafts in (False, True)
    )
    more = drafting - without
    assert more
    assert all(name.startswith("mtp.") for name in more)
    last = text["dspark_n_routed_experts"] - 1
    assert f"mtp.0.ffn.experts.{last}.w1.weight" in more


@pytest.mark.parametrize("name", ["vision", "v4.1"])
def test_the_tower_is_as_large_as_published(name: str, tmp_path: Path):
    """316 tensors more than Flash with DSpark's draft: 32 blocks, nine of tower
    and aligner, four vectors, and the biases of 46 routers and of three hash layers."""
    _, tensors = shapes.published(name, tmp_path)
    seen = [n for n in tensors if n.startswith(("vision.", "aligner.", "image_"))]
    blocks = {n.split(".")[2] for n in seen if n.startswith("vision.blocks.")}
    assert len(blocks) == 32
    if name == "vision":
        biases = [n for n in tensors if n.endswith(".bias_vl")]
        assert len(seen) + len(biases) + 3 == 316
    size = sum(tensors[n].numel() * 2 for n in seen)
    assert 0.8e9 < size < 1.1e9


@pytest.mark.parametrize("name", ["flash", "pro", "vision", "v4.1"])
def test_a_configuration_tells_the_tensors(name: str, tmp_path: Path):
    config, tensors = shapes.published(name, tmp_path)
    again, told = shapes.described(config, tmp_path)
    kinds = [
        {key: (one.dtype, one.shape) for key, one in of.items()}
        for of in (tensors, told)
    ]
    assert kinds[0] == kinds[1]
    assert again == config


def test_the_layers_of_a_name_are_those_of_its_tensors():
    known, writer = NAMED["v4.1"], shapes.V41
    assert known.ratios == writer.size.ratios
    assert known.writing == writer.kv_sources
    assert known.begins == (8, 14, 20)
    assert NAMED["flash"].begins == tuple(range(3, 43))
    assert {one.length for one in NAMED.values()} == {shapes.LENGTH}
