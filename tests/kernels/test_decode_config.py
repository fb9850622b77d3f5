# SPDX-License-Identifier: Apache-2.0
"""How decode is cut into programs, and the workspace that is reserved for it."""

import pytest

from kernels.xpu_dsv4._decode_config import decode_config
from kernels.xpu_dsv4.sparse_decode import sparse_decode_workspace_size

HEADS = pytest.mark.parametrize("heads", [1, 16, 17, 64, 65, 128])
KEYS = pytest.mark.parametrize("keys", [1, 128, 640, 8320])
KIND = pytest.mark.parametrize("kind", ["xpu", "cuda"])


@KIND
@HEADS
@KEYS
def test_splits_are_powers_of_two_and_never_grow_with_the_batch(keys, heads, kind):
    splits = [decode_config(kind, t, heads, keys).splits for t in range(1, 301)]
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1
    assert all(count & (count - 1) == 0 for count in splits)


@KIND
@HEADS
@KEYS
def test_workspace_size_is_what_the_largest_batch_needs(keys, heads, kind):
    needed = [
        tokens * heads * splits * 514
        for tokens in range(1, 301)
        if (splits := decode_config(kind, tokens, heads, keys).splits) > 1
    ]
    for most in (300, 10**12):
        size = sparse_decode_workspace_size(most, heads, keys, kind)
        assert size == max(needed, default=0)
