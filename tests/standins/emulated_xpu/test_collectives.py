# SPDX-License-Identifier: Apache-2.0
"""Collectives of the emulated XPU take what XCCL takes, and no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from own_process import in_own_process

from standins.emulated_xpu.collectives import Collectives, provide

RANKS = 2
LENGTHS = (1, 3)


def join(rank: int, ranks: int, folder: Path) -> Any:
    """The group of all ranks, which look at what they send."""
    provide()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    return torch.distributed.group.WORLD


def gather(rank: int, folder: Path) -> None:
    dist, group = Collectives(), join(rank, RANKS, folder)
    own = torch.full((LENGTHS[rank], 2), float(rank))
    parts = [torch.empty(length, 2) for length in LENGTHS]
    dist.all_gather(parts, own, group)
    assert torch.cat(parts)[:, 0].tolist() == [0, 1, 1, 1]
    even, whole = torch.full((2, 2), float(rank)), torch.empty(4, 2)
    dist.all_gather([whole], even, group)
    assert whole[:, 0].tolist() == [0, 0, 1, 1]
    codes = even.to(torch.float8_e4m3fn)
    dist.all_gather([whole.to(codes.dtype)], codes, group)
    dist.all_reduce(even, group=group)
    assert even.eq(1).all()
    (torch.distributed.send if rank else torch.distributed.recv)(own[:1], 1 - rank)
    assert own[0].eq(1).all()
    swap(rank)
    # A rank that ends while the other still answers it aborts.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def swap(rank: int) -> None:
    """Several sends as one, as experts move to another rank."""
    dist, other = torch.distributed, 1 - rank
    mine, theirs = torch.full((2, 2), float(rank)), torch.empty(2, 2)
    both = [
        dist.P2POp(dist.isend, mine, other),
        dist.P2POp(dist.irecv, theirs, other),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert theirs.eq(other).all()


def test_different_lengths_and_one_tensor_for_all(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        gather, (tmp_path,), nprocs=RANKS, start_method="fork"
    )


def refused(name: str, folder: Path) -> str:
    group = join(0, 1, folder)
    try:
        REFUSED[name][0](Collectives(), group)
    except (TypeError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


SQUARE = torch.ones(4, 4)
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a transpose": (
        lambda dist, group: dist.all_reduce(SQUARE[:, :2], group=group),
        "ValueError: XCCL takes contiguous",
    ),
    "scales as E8M0": (
        lambda dist, group: dist.broadcast(
            SQUARE.to(torch.float8_e8m0fnu), src=0, group=group
        ),
        "TypeError: XCCL carries no torch.float8_e8m0fnu",
    ),
    "a sum of FP8": (
        lambda dist, group: dist.all_reduce(SQUARE.to(torch.float8_e4m3fn)),
        "RuntimeError: XCCL reduces no torch.float8_e4m3fn",
    ),
    "a sum of FP8 for one rank": (
        lambda dist, group: dist.reduce(SQUARE.to(torch.float8_e4m3fn), 0),
        "RuntimeError: XCCL reduces no torch.float8_e4m3fn",
    ),
    "columns of all to all": (
        lambda dist, group: dist.all_to_all_single(SQUARE[:, :2], SQUARE[:, 2:]),
        "ValueError: XCCL takes contiguous",
    ),
    "scales for one rank": (
        lambda dist, group: dist.gather(
            SQUARE.to(torch.float8_e8m0fnu),
            [SQUARE.to(torch.float8_e8m0fnu)],
            group=group,
        ),
        "TypeError: XCCL carries no torch.float8_e8m0fnu",
    ),
    "scales to the next stage": (
        lambda _, group: torch.distributed.isend(
            SQUARE.to(torch.float8_e8m0fnu), dst=0, group=group
        ),
        "TypeError: XCCL carries no torch.float8_e8m0fnu",
    ),
    "columns to the next stage": (
        lambda _, group: torch.distributed.isend(SQUARE[:, :2], dst=0, group=group),
        "ValueError: XCCL takes contiguous",
    ),
    "columns in a batch of sends": (
        lambda _, group: torch.distributed.batch_isend_irecv(
            [torch.distributed.P2POp(torch.distributed.isend, SQUARE[:, :2], 0, group)]
        ),
        "ValueError: XCCL takes contiguous",
    ),
    "a tensor of another length": (
        lambda dist, group: dist.all_gather([torch.empty(3, 4)], SQUARE, group),
        "ValueError: XCCL gathers 16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_xccl_refuses(name: str, tmp_path: Path) -> None:
    assert in_own_process(refused, name, tmp_path).startswith(REFUSED[name][1])
