# SPDX-License-Identifier: Apache-2.0
"""Writes rows into pages and leaves out rows without a slot, without a host sync."""

import torch


def write_rows(
    memory: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor
) -> None:
    """Write `rows[i]` to the bytes `places[i]` of `memory` wherever `valid[i]`.

    A row that is not valid repeats the first valid one, in bytes and place. If none is,
    the bytes at the first place of the memory are written where they lie.

    Args:
        memory: `[N]` bytes.
        places: `[R, B]` int64, inside the memory where valid.
        rows: `[R, B]` bytes.
        valid: `[R]` bool.
    """
    if not len(rows):
        return
    first = valid.int().argmax()
    row = torch.where(valid, torch.arange(len(valid), device=valid.device), first)
    any_valid = valid.any()
    start = torch.arange(rows.shape[1], device=rows.device)
    places = torch.where(any_valid, places[row], start)
    memory[places] = torch.where(any_valid, rows[row], memory[places])
