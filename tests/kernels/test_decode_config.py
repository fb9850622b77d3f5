# SPDX-License-Identifier: Apache-2.0
"""How decode is cut into programs, and the workspace that is reserved for it."""

import pytest

from kernels.xpu_dsv4 import _decode_config
from kernels.xpu_dsv4._decode_config import sparse_decode_workspace_size

HEADS = pytest.mark.parametrize("heads", [1, 16, 17, 64, 65, 128])
KEYS = pytest.mark.parametrize("keys", [1, 128, 640, 8320])
MORE_KEYS = pytest.mark.parametrize("keys", [1, 65, 96, 128, 288, 640, 8320])


@HEADS
@KEYS
def test_no_split_is_idle_and_splits_never_grow_with_the_batch(keys, heads, tuned_for):
    configs = [_decode_config.decode_config(t, heads, keys) for t in range(1, 301)]
    splits = [config.splits for config in configs]
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1
    for config in configs:
        tiles = -(-keys // config.block_n)
        tiles_per_split = -(-tiles // config.splits)
        assert -(-tiles // tiles_per_split) == config.splits


@HEADS
@MORE_KEYS
def test_workspace_size_is_what_the_largest_batch_needs(keys, heads, tuned_for):
    needed = [
        tokens * heads * splits * 514
        for tokens in range(1, 301)
        if (splits := _decode_config.decode_config(tokens, heads, keys).splits) > 1
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
    monkeypatch.setattr(_decode_config, "_xe_cores", lambda: xe_cores)
    assert _decode_config.decode_config(tokens, heads, 640).splits == splits


def test_end_to_end_jobs_can_do_without_splits(monkeypatch):
    """As `e2e.decode_plan` does."""
    monkeypatch.setattr(_decode_config, "XE_CORES", 0)
    monkeypatch.setattr(
        _decode_config, "_xe_cores", _decode_config._xe_cores.__wrapped__
    )
    assert _decode_config.decode_config(1, 8, 640).splits == 1
