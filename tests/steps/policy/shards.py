# SPDX-License-Identifier: Apache-2.0
"""A shard that cannot be opened is named, with the tensor at which it is cut off."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import layout
from helpers.loading import NAME, message
from safetensors import SafetensorError
from safetensors.torch import save_file

LAST = "rest.weight"


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The error of loading a shard of two tensors of 16,384 bytes each that ends at
    `size`, and whose first bytes are replaced."""

    def found(shard: Path, size: int | None = None, first: bytes = b"") -> str:
        save_file({NAME: torch.zeros(64, 64), LAST: torch.zeros(64, 64)}, shard)
        data = shard.read_bytes()
        shard.write_bytes((first + data[len(first) :])[:size])
        error = message(monkeypatch, {}, shard=shard)
        assert error, "it is loaded"
        return error

    return found


def test_a_truncated_shard(tmp_path: Path, refusal: Callable[..., str]) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    found = refusal(shard, -8)
    assert shard.name in found, found
    assert f"ends before the end of {LAST}" in found, found
    assert f"ends before the end of {LAST}" in refusal(shard, -16384)
    assert f"ends before the end of {NAME}" in refusal(shard, -16384 - 8)


@pytest.mark.parametrize(
    ("size", "first"),
    [(4, b""), (40, b""), (None, b"\x40"), (None, b"\xff" * 8)],
    ids=["no length", "no header", "another length", "a length beyond all"],
)
def test_a_shard_with_a_damaged_header(
    tmp_path: Path, size: int | None, first: bytes, refusal: Callable[..., str]
) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    assert shard.name in refusal(shard, size, first)


def test_an_error_of_shards_that_are_whole(tmp_path: Path) -> None:
    """It keeps its own words."""
    shard = str(tmp_path / "model.safetensors")
    save_file({NAME: torch.ones(4, 4)}, shard)
    found = layout.module("vllm_xpu_dsv4.checkpoint_shards").cut_shard
    assert found([shard], SafetensorError("the disk is gone")) == "the disk is gone"


@pytest.mark.unchanged
def test_a_whole_shard(tmp_path: Path) -> None:
    utils = layout.module("vllm.model_executor.model_loader.weight_utils")
    shard = tmp_path / "model.safetensors"
    save_file({NAME: torch.ones(4, 4)}, shard)
    ((name, tensor),) = utils.safetensors_weights_iterator([str(shard)], False)
    assert name == NAME and bool((tensor == 1).all())
