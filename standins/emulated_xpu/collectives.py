# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed` over gloo, which takes what XCCL takes and refuses what it does.

The rules are those of torch-xpu-ops (`src/xccl/ProcessGroupXCCL.cpp`).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d

CARRIED = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
FP8 = {
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz),
}
"""Moved as bytes, but not reduced."""
MOVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast"),
    *("all_to_all", "all_to_all_single", "gather", "scatter"),
)
REDUCES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
SENDS = ("isend", "irecv", "send", "recv")
"""What stages of a pipeline call by these names of torch."""


def provide() -> None:
    """Make torch's own functions look at their tensors first, whichever group they are
    called for: a device's would refuse what is refused here."""
    for name in (*MOVES, *REDUCES, *SENDS):
        if found := getattr(torch.distributed, name, None):
            setattr(torch.distributed, name, _checked(name, found))
    # `P2POp` takes these two alone, by their names there.
    for name in ("isend", "irecv"):
        setattr(distributed_c10d, name, getattr(torch.distributed, name))


def _checked(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check((args, kwargs), reduced=name in REDUCES)
        return found(*args, **kwargs)

    return checked


class Collectives:
    """Stands for the module, whose gathering gloo does not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(
        tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any
    ) -> None:
        """Gather into one tensor for all ranks, or into one for each, of its length.

        gloo takes neither a single tensor nor different lengths.
        """
        check((tensors, tensor), reduced=False)
        ranks = torch.distributed.get_process_group_ranks(group)
        own = ranks.index(torch.distributed.get_rank())
        if len(tensors) == 1:
            tensors = list(tensors[0].view(-1).chunk(len(ranks)))
        if len(tensors) != len(ranks) or tensors[own].numel() != tensor.numel():
            raise ValueError(
                f"XCCL gathers {tensor.numel()} elements of each of {len(ranks)} ranks,"
                f" not into {[part.numel() for part in tensors]}"
            )
        for rank, part in zip(ranks, tensors, strict=True):
            if rank == ranks[own]:
                part.view(-1).copy_(tensor.view(-1))
            moved = part.view(torch.uint8) if part.dtype in FP8 else part
            torch.distributed.broadcast(moved, src=rank, group=group)


def check(arguments: Any, reduced: bool) -> None:
    """Look at the tensors among the arguments.

    Raises:
        TypeError: XCCL has no such element.
        RuntimeError: it reduces none of FP8.
        ValueError: it takes contiguous memory alone. It would send a transpose, which
            gloo does not.
    """
    for tensor in tensors_in(arguments):
        if tensor.dtype not in CARRIED | FP8:
            raise TypeError(f"XCCL carries no {tensor.dtype}")
        if reduced and tensor.dtype in FP8:
            raise RuntimeError(f"XCCL reduces no {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"XCCL takes contiguous tensors: {tensor.stride()}")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
