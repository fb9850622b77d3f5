# SPDX-License-Identifier: Apache-2.0
"""Pages that NIXL moves by host memory arrive, and leave all other bytes alone.

Layers of several groups lie in the same rows of one allocation, each at an offset of
its own; a row is a block, and belongs to one group.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
ROWS, WIDTH, POISON = 8, 96, 0x5A
Groups = dict[str, dict[str, slice]]
GROUPS: Groups = {
    "pages": {"layers.0": slice(0, 40), "layers.1": slice(40, 96)},
    "windows": {"layers.0.swa": slice(0, 64)},
    "states": {"layers.0.state": slice(8, 24), "layers.1.state": slice(24, 32)},
}


def server(rows: torch.Tensor, groups_of: Groups) -> Any:
    """A worker of NIXL with host memory, as far as its copies reach."""
    views = {
        name: rows[:, columns]
        for layers in groups_of.values()
        for name, columns in layers.items()
    }
    groups = [
        SimpleNamespace(layer_names=list(layers)) for layers in groups_of.values()
    ]
    return SimpleNamespace(
        use_host_buffer=True,
        copy_blocks=layout.module(
            "vllm.distributed.kv_transfer.kv_connector.utils"
        ).copy_kv_blocks,
        host_xfer_buffers={
            name: torch.full(view.shape, POISON, dtype=view.dtype)
            for name, view in views.items()
        },
        device_kv_caches=views,
        kv_cache_config=SimpleNamespace(transfer_groups=groups, kv_cache_groups=groups),
        _physical_blocks_per_logical_kv_block=1,
        _logical_to_kernel_block_ids=lambda ids, ratio: ids,
    )


def transferred(
    groups: Groups, blocks: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows `[ROWS, WIDTH]` of a receiver, which were poisoned, and what they must
    be: the sender's bytes in these blocks of each group, and poison elsewhere."""
    metadata = layout.module(f"{NIXL}.metadata")
    worker = layout.module(f"{NIXL}.base_worker").NixlBaseConnectorWorker
    sent = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8)
    received = torch.full_like(sent, POISON)
    sender, receiver = server(sent, groups), server(received, groups)
    asked = metadata.NixlConnectorMetadata()
    asked.reqs_to_save["request"] = metadata.ReqMeta(blocks, [], 1)
    worker.save_kv_to_host(sender, asked)
    wanted = torch.full_like(sent, POISON)
    for layers, ids in zip(groups.values(), blocks, strict=True):
        for name, columns in layers.items():
            # NIXL reads a block of a group by the layers of this group.
            remote, local = sender.host_xfer_buffers, receiver.host_xfer_buffers
            local[name][ids] = remote[name][ids]
            wanted[ids, columns] = sent[ids, columns]
    worker.sync_recved_kv_to_device(
        receiver, "request", metadata.ReqMeta(blocks, blocks, 1)
    )
    return received, wanted


@pytest.mark.parametrize(
    "blocks", [[[1, 2], [3, 4], [5]], [[1], [], [7]], [[6, 2], [1], []]]
)
def test_each_groups_bytes_arrive(blocks: list[list[int]]) -> None:
    received, wanted = transferred(GROUPS, blocks)
    wrong = int((received != wanted).sum())
    assert not wrong, f"{wrong} bytes of another group are overwritten"


@pytest.mark.unchanged
@pytest.mark.parametrize("name", GROUPS)
def test_a_model_of_one_group(name: str) -> None:
    received, wanted = transferred({name: GROUPS[name]}, [[1, 5]])
    assert torch.equal(received, wanted)
