# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of copies by address move bytes, and take what a device takes."""

import pytest
import torch

from standins.emulated_xpu.ops.host_copies import (
    swap_blocks_batch,
    xpu_host_register,
    xpu_host_unregister,
)


def addresses(*rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64)


def test_rows_are_copied() -> None:
    source, target = torch.arange(12).view(3, 4), torch.zeros(3, 4, dtype=torch.int64)
    sizes = torch.tensor([32, 16], dtype=torch.uint64)
    swap_blocks_batch(
        addresses(source[2], source[0]), addresses(target[0], target[2]), sizes
    )
    assert target.tolist() == [[8, 9, 10, 11], [0] * 4, [0, 1, 0, 0]]


@pytest.mark.parametrize("wrong", [torch.zeros(1, dtype=torch.int64), torch.ones(2)])
def test_addresses_are_unsigned(wrong: torch.Tensor) -> None:
    """CUDA's are int64, which an XPU's op refuses."""
    right = torch.zeros(1, dtype=torch.uint64)
    with pytest.raises(ValueError, match="must be uint64"):
        swap_blocks_batch(wrong, right, right)


def test_a_range_is_registered_once() -> None:
    assert xpu_host_register(4096, 64)
    assert not xpu_host_register(4096, 64)
    assert xpu_host_unregister(4096)
    assert not xpu_host_unregister(4096)
    assert not xpu_host_register(0, 64)
