# SPDX-License-Identifier: Apache-2.0
"""The bytes of an engine's KV caches, by group and block: poisoned, seen and compared.

A cache has a part of a row for each block, and caches of several groups may share rows;
a block belongs to one group.
"""

from dataclasses import dataclass
from typing import Any

import torch

SENT, RECEIVED = 0x3C, 0x5A
"""What bytes are before, of the engine that sends and of the one that receives."""
Rows = list[dict[str, torch.Tensor]]
"""By group and layer, the bytes of blocks `[blocks, bytes]`."""


@dataclass
class Seen:
    """What a receiver has once a transfer ended."""

    ids: list[list[int]]
    """Of each group, in the order of a prompt's tokens; 0 where there is no block."""
    known: list[list[bool]]
    """Which were there before, by the prefix cache."""
    rows: Rows
    stray: int
    """Bytes that changed in the rows of other blocks."""


class Pages:
    """The caches of one engine with NIXL's connector."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self._manager, self._worker = scheduler.kv_cache_manager, worker
        self._groups = worker.kv_cache_config.transfer_groups
        self._caches = {
            name: _by_blocks(view) for name, view in worker.device_kv_caches.items()
        }
        self._before: dict[int, torch.Tensor] = {}

    def poison(self, byte: int) -> None:
        """Overwrite every block that holds no prefix, the null block too, and the
        buffers of the host."""
        blocks = self._manager.block_pool.blocks
        free = [block.block_id for block in blocks if block.block_hash is None]
        for rows, _ in self._caches.values():
            rows[free] = byte
        for buffer in self._worker.host_xfer_buffers.values():
            buffer.view(torch.uint8).fill_(byte)
        self._before = {
            rows.data_ptr(): rows.clone() for rows, _ in self._caches.values()
        }

    def rows(self, ids: list[list[int]]) -> Rows:
        """The bytes of blocks, by group."""
        return [
            {
                name: self._caches[name][0][blocks][:, self._caches[name][1]].cpu()
                for name in group.layer_names
            }
            for group, blocks in zip(self._groups, ids, strict=True)
        ]

    def overwrite(self, ids: list[list[int]]) -> None:
        """Change a byte of the last block of the first group, where it is fetched."""
        group = self._groups[0]
        buffers = self._worker.host_xfer_buffers or self._worker.device_kv_caches
        block = buffers[group.layer_names[0]][ids[0][-1]]
        block.view(torch.uint8).view(-1)[0] ^= 0xFF

    def seen(self, request: str) -> Seen:
        """What a request has, whose tokens are not computed yet."""
        held = self._manager.get_blocks(request).blocks
        groups = self._worker.kv_cache_config.select_transfer_block_ids(held)
        ids = [[block.block_id for block in blocks] for blocks in groups]
        known = [
            [block.block_hash is not None for block in blocks] for blocks in groups
        ]
        others = torch.ones(len(self._manager.block_pool.blocks), dtype=torch.bool)
        others[[block for blocks in ids for block in blocks if block]] = False
        stray = {
            rows.data_ptr(): int((rows != self._before[rows.data_ptr()])[others].sum())
            for rows, _ in self._caches.values()
        }
        return Seen(ids, known, self.rows(ids), sum(stray.values()))

    def compared(
        self, seen: Seen, sent: list[list[int]], rows: Rows, length: int
    ) -> dict[str, Any]:
        """Compare what arrived of a prompt of `length` tokens with the blocks that were
        `sent`, whose bytes are `rows`.

        Returns:
            `stray` bytes, and by group how many blocks are `compared` and `known`, how
            many bytes of them are `wrong`, and how many blocks that the prompt's last
            token sees are `missing` on either side.
        """
        found = {}
        for number, group in enumerate(self._groups):
            spec = _of_one_layer(group.kv_cache_spec)
            window = getattr(spec, "sliding_window", None) or length
            tail = sent[number]
            table = seen.ids[number]
            assert len(table) == -(-length // spec.block_size), (len(table), length)
            entry = {"compared": 0, "known": 0, "wrong": 0, "missing": 0}
            for place, block in enumerate(table):
                if (place + 1) * spec.block_size <= length - window:
                    continue
                theirs = place - len(table) + len(tail)
                if seen.known[number][place]:
                    entry["known"] += 1
                elif not block or theirs < 0 or not tail[theirs]:
                    entry["missing"] += 1
                else:
                    entry["compared"] += 1
                    entry["wrong"] += sum(
                        int((ours[place] != rows[number][name][theirs]).sum())
                        for name, ours in seen.rows[number].items()
                    )
            found[", ".join(group.layer_names)] = entry
        return {"stray": seen.stray, "groups": found}


def _of_one_layer(spec: Any) -> Any:
    """The layers of a group have specifications of the same window and block."""
    specs = getattr(spec, "kv_cache_specs", None)
    return next(iter(specs.values())) if specs else spec


def _by_blocks(view: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """The rows `[blocks, bytes]` that a cache shares, and its own part of each."""
    assert view[0].is_contiguous()
    width = view.stride(0) * view.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    whole = whole.set_(view.untyped_storage())
    first = view.storage_offset() * view.element_size()
    assert first < width
    rows = whole[: len(view) * width].view(len(view), width)
    return rows, slice(first, first + view[0].nbytes)
