# SPDX-License-Identifier: Apache-2.0
"""The bytes of an engine's KV caches, by rank, group and block: poisoned, seen and
compared.

A cache has a part of a row for each block, and caches of several groups may share rows;
a block belongs to one group. Every tensor-parallel rank has all of it.
"""

import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
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
    rows: list[Rows]
    """Of each rank."""
    stray: int
    """Bytes that changed in the rows of other blocks."""


class RankPages:
    """The caches of one rank with NIXL's connector: a part of its worker
    (`worker_extension_cls`)."""

    def open_pages(self) -> None:
        """Find the caches, and let the main thread come first: NIXL's looks for
        messages all the time, and several engines share few cores."""
        transfers: Any = importlib.import_module("vllm.distributed.kv_transfer")
        worker = transfers.get_kv_transfer_group().connector_worker
        self._buffers = worker.host_xfer_buffers
        self._views = worker.device_kv_caches
        self._caches = {name: _by_blocks(view) for name, view in self._views.items()}
        self._layers = [
            group.layer_names for group in worker.kv_cache_config.transfer_groups
        ]
        self._before: dict[int, torch.Tensor] = {}
        for thread in Path("/proc/self/task").iterdir():
            if int(thread.name) != os.getpid():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)

    def poison_pages(self, byte: int, blocks: list[int]) -> None:
        """Overwrite these blocks, and the buffers of the host."""
        for rows, _ in self._caches.values():
            rows[blocks] = byte
        for buffer in self._buffers.values():
            buffer.view(torch.uint8).fill_(byte)
        self._before = {
            rows.data_ptr(): rows.clone() for rows, _ in self._caches.values()
        }
        if next(iter(self._before.values())).device.type != "cpu":
            # A transfer waits for no kernel, and would be poisoned behind.
            torch.accelerator.synchronize()

    def page_rows(self, ids: list[list[int]]) -> Rows:
        """The bytes of blocks, by group."""
        return [
            {
                name: self._caches[name][0][blocks][:, self._caches[name][1]].cpu()
                for name in layers
            }
            for layers, blocks in zip(self._layers, ids, strict=True)
        ]

    def overwrite_page(self, block: int) -> None:
        """Change a byte of a block of the first group, where it is fetched."""
        buffers = self._buffers or self._views
        page = buffers[self._layers[0][0]][block]
        page.view(torch.uint8).view(-1)[0] ^= 0xFF

    def stray_bytes(self, ids: list[list[int]]) -> int:
        """How many bytes are not as before in the rows of all other blocks."""
        stray = {}
        for rows, _ in self._caches.values():
            others = torch.ones(len(rows), dtype=torch.bool)
            others[[block for blocks in ids for block in blocks if block]] = False
            before = self._before[rows.data_ptr()]
            stray[rows.data_ptr()] = int((rows != before)[others].sum())
        return sum(stray.values())


class Pages:
    """The caches of one engine with NIXL's connector, on all of its ranks."""

    def __init__(self, core: Any) -> None:
        """`core` is the engine's, whose workers are `RankPages`."""
        self._manager = core.scheduler.kv_cache_manager
        self._config = core.scheduler.kv_cache_config
        self._on_ranks = core.model_executor.collective_rpc
        self._on_ranks("open_pages")

    def poison(self, byte: int) -> None:
        """Overwrite every block that holds no prefix, the null block too, and the
        buffers of the host."""
        blocks = self._manager.block_pool.blocks
        free = [block.block_id for block in blocks if block.block_hash is None]
        self._on_ranks("poison_pages", args=(byte, free))

    def take_free(self) -> tuple[Any, ...]:
        """Leave no block free."""
        pool = self._manager.block_pool
        return tuple(pool.get_new_blocks(pool.get_num_free_blocks()))

    def give_back(self, taken: Iterable[Any]) -> None:
        """Free the blocks that `take_free` gave."""
        self._manager.block_pool.free_blocks(taken)

    def rows(self, ids: list[list[int]]) -> list[Rows]:
        """The bytes of blocks, by rank and group."""
        found: list[Rows] = self._on_ranks("page_rows", args=(ids,))
        return found

    def overwrite(self, ids: list[list[int]]) -> None:
        """Change a byte of the last block of the first group, where it is fetched."""
        self._on_ranks("overwrite_page", args=(ids[0][-1],))

    def seen(self, request: str) -> Seen:
        """What a request has, whose tokens are not computed yet."""
        held = self._manager.get_blocks(request).blocks
        groups = self._config.select_transfer_block_ids(held)
        ids = [[block.block_id for block in blocks] for blocks in groups]
        known = [
            [block.block_hash is not None for block in blocks] for blocks in groups
        ]
        stray = sum(self._on_ranks("stray_bytes", args=(ids,)))
        return Seen(ids, known, self.rows(ids), stray)

    def compared(
        self, seen: Seen, sent: list[list[int]], rows: list[Rows], length: int
    ) -> dict[str, Any]:
        """Compare what arrived of a prompt of `length` tokens with the blocks that were
        `sent`, whose bytes are `rows`. A rank reads those of one of the sender's.

        Returns:
            `stray` bytes, how many of the `sent` ones are `unlike` the first rank's,
            and by group how many blocks are `compared` and `known`, how many bytes of
            them are `wrong` on all ranks, and how many blocks that the prompt's last
            token sees are `missing` on either side.
        """
        found = {}
        pairs = [
            (ours, rows[rank * len(rows) // len(seen.rows)])
            for rank, ours in enumerate(seen.rows)
        ]
        for number, group in enumerate(self._config.transfer_groups):
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
                        int((page[place] != other[number][name][theirs]).sum())
                        for ours, other in pairs
                        for name, page in ours[number].items()
                    )
            found[", ".join(group.layer_names)] = entry
        unlike = sum(
            int((page != first[name]).sum())
            for own in rows[1:]
            for group, first in zip(own, rows[0], strict=True)
            for name, page in group.items()
        )
        return {"stray": seen.stray, "unlike": unlike, "groups": found}


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
