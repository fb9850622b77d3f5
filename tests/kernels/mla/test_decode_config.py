# SPDX-License-Identifier: Apache-2.0
"""How decode is cut into programs, and the workspace that is reserved for it."""

import pytest
from hypothesis import example, given
from hypothesis.strategies import integers

from kernels.xpu_dsv4 import _device
from kernels.xpu_dsv4.mla import _decode_config
from kernels.xpu_dsv4.mla._decode_config import sparse_decode_workspace_size


@given(keys=integers(1, 8320), heads=integers(1, 128))
@example(keys=8320, heads=1)
def test_splits_and_their_workspace(keys, heads):
    """No split is idle, splits never grow with the batch, and the workspace is what the
    largest batch needs."""
    configs = [_decode_config.decode_config(t, heads, keys) for t in range(1, 301)]
    splits = [config.splits for config in configs]
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1
    for config in configs:
        tiles = -(-keys // config.block_n)
        tiles_per_split = -(-tiles // config.splits)
        assert -(-tiles // tiles_per_split) == config.splits
    needed = [
        tokens * heads * shares * 514
        for tokens, shares in enumerate(splits, start=1)
        if shares > 1
    ]
    for most in (300, 10**12):
        size = sparse_decode_workspace_size(most, heads, keys)
        assert size == max(needed, default=0)


@pytest.mark.parametrize(
    ("xe_cores", "heads", "tokens", "splits"),
    [
        (20, 64, 1, 20),
        (20, 64, 16, 2),
        (20, 64, 128, 1),
        (64, 64, 16, 8),
        (20, 8, 16, 10),
    ],
)
def test_splits_fill_an_xpu_once(xe_cores, heads, tokens, splits, monkeypatch):
    monkeypatch.setattr(_device, "xe_cores", lambda: xe_cores)
    assert _decode_config.decode_config(tokens, heads, 640).splits == splits


def test_end_to_end_jobs_can_do_without_splits(monkeypatch):
    """As `proof.e2e.inside.engine` does."""
    monkeypatch.setattr(_device, "XE_CORES", 0)
    monkeypatch.setattr(_device, "xe_cores", _device.xe_cores.__wrapped__)
    assert _decode_config.decode_config(1, 8, 640).splits == 1
