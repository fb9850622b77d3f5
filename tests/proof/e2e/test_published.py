# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that are made here have the tensors that published ones have.

A tensor that only a made checkpoint has hides what a loader does without it.
"""

import functools
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from proof.e2e.checkpoints import checkpoint, dspark, mtp, packed, v41, vision

KINDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("published.toml").read_text()
)["kinds"]
MADE: dict[str, Callable[[], checkpoint.Writer]] = {
    "flash": lambda: checkpoint.Writer(0),
    "flash, a draft that knows": lambda: mtp.Mtp(0, {}),
    "flash, six layers": lambda: mtp.Mtp(0, {}, mtp.SIX_LAYERS),
    "nvfp4-experts, a draft that knows": lambda: mtp.Nvfp4Experts(0, {}),
    "dspark": lambda: dspark.DSpark(0, {}),
    "vision": lambda: vision.Vision(0),
    "v4.1": lambda: v41.V41(0),
} | {name: lambda made=made: made(0) for name, made in packed.WRITERS.items()}
"""The kind, and what is special about it."""


def published(kind: str) -> dict[str, str]:
    """Types of a kind's tensors, by names with `*` for each number."""
    described = KINDS[kind]
    like = published(described["like"]) if "like" in described else {}
    found = {
        name: type_
        for name, type_ in like.items()
        if name not in described.get("without", ())
    } | described.get("tensors", {})
    for end, type_ in described.get("types", {}).items():
        found |= {name: type_ for name in found if name.endswith(end)}
    for layer, parts in described.get("parts", {}).items():
        for name in [n for n in found if fnmatchcase(n.rpartition(".")[0], layer)]:
            owner = name.rpartition(".")[0]
            del found[name]
            found |= {f"{owner}.{part}": type_ for part, type_ in parts.items()}
    return found


@functools.cache
def made(name: str) -> dict[str, str]:
    """Types of the tensors of a written checkpoint, by name."""
    with tempfile.TemporaryDirectory() as folder:
        written = checkpoint.write(Path(folder), MADE[name]())[0]
        with safe_open(written / "model.safetensors", "pt") as file:
            names = file.keys()
            return {n: file.get_slice(n).get_dtype() for n in names}


def difference(kind: str, found: dict[str, str]) -> list[str]:
    """What a checkpoint has too much, lacks, or has in another type."""
    wanted = published(kind)
    general = {n: re.sub(r"(?<=\.)\d+(?=\.)", "*", n) for n in found}
    lacking = wanted.keys() - general.values()
    faults = [f"published ones have {name}" for name in lacking]
    for name, type_ in found.items():
        if general[name] not in wanted:
            faults.append(f"no published one has {name}")
        elif type_ != wanted[general[name]]:
            faults.append(f"{name} is {type_}, published {wanted[general[name]]}")
    return sorted(faults)


@pytest.mark.parametrize("name", MADE)
def test_names_and_types(name: str) -> None:
    kind = name.partition(",")[0]
    writer, found = MADE[name](), made(name)
    faults = difference(kind, found)
    assert not faults, f"{KINDS[kind]['of']}: {faults}"
    for layer, ratio in enumerate(writer.size.ratios):
        names = {n for n in found if n.startswith(f"layers.{layer}.")}
        new = kind == "v4.1"
        compresses = layer in v41.KV_SOURCES if new else ratio != 0
        chooses = layer in v41.INDEX_SOURCES if new else ratio == 4
        assert any(".attn.compressor." in n for n in names) == compresses
        assert any(".attn.indexer." in n for n in names) == chooses
        assert any(".engram." in n for n in names) == (
            new and layer in v41.ENGRAM_LAYERS
        )
        hashed = layer < writer.size.hashed
        gates = {n.rpartition(".")[2] for n in names if ".ffn.gate." in n}
        wanted = {"weight", "tid2eid" if hashed else "bias"}
        if kind in ("vision", "v4.1"):
            wanted |= {"bias", "bias_vl"}
        assert gates == wanted


def test_a_tower_and_its_text_model_have_as_many_tensors_as_published() -> None:
    """Of 32 blocks, 43 layers, three of them hashed, and three of the draft."""
    like, own = published("dspark"), published("vision")
    sizes = {"vision.blocks.": 32, "layers.": 43, "mtp.": 3}
    more = [
        next((n for start, n in sizes.items() if name.startswith(start)), 1)
        for name in own.keys() - like.keys()
    ]
    assert sum(more) + 3 == 316


@pytest.mark.parametrize("name", ["flash", "nvfp4-experts", "dspark"])
def test_how_many_tensors_a_draft_has(name: str) -> None:
    """Beside the experts' six, the counts of the published indexes."""
    writer, found = MADE[name](), made(name)
    layers = Counter(
        n.split(".")[1]
        for n in found
        if n.startswith("mtp.") and ".ffn.experts." not in n
    )
    experts = Counter(
        n.split(".")[1] for n in found if re.match(r"mtp\..*\.ffn\.experts\.", n)
    )
    counts = KINDS[name].get("draft_tensors", KINDS["flash"]["draft_tensors"])
    assert [layers[key] for key in sorted(layers)] == [counts[0], *counts[2:]]
    assert set(experts.values()) == {6 * writer.size.experts}


@pytest.mark.parametrize(
    ("tensor", "type_"),
    [
        ("mtp.0.emb.tok_emb.weight", "BF16"),
        ("mtp.0.head.weight", "BF16"),
        ("layers.1.attn.wkv.scale", "F32"),
    ],
)
def test_a_wrong_tensor_is_seen(tensor: str, type_: str) -> None:
    found = made("flash")
    assert not difference("flash", found)
    assert difference("flash", found | {tensor: type_})


def test_what_is_unconfirmed_is_there() -> None:
    """A pattern that fits nothing would confirm by accident."""
    for kind, described in KINDS.items():
        assert described["sources"] and described["of"], kind
        for pattern in described["unconfirmed"]:
            assert any(fnmatchcase(name, pattern) for name in published(kind)), pattern
