# SPDX-License-Identifier: Apache-2.0
"""The release's own communicator of XPU, over gloo where a device has XCCL."""

from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators import xpu_communicator
from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator


class Collectives:
    """`torch.distributed`, whose gathering of tensors takes what XCCL's takes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(
        tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any
    ) -> None:
        """Gather into one tensor for all ranks, or into one for each, of its length.

        gloo takes neither a single tensor nor different lengths.
        """
        ranks = torch.distributed.get_process_group_ranks(group)
        if len(tensors) == 1:
            tensors = list(tensors[0].chunk(len(ranks)))
        for rank, part in zip(ranks, tensors, strict=True):
            if rank == torch.distributed.get_rank():
                part.copy_(tensor)
            torch.distributed.broadcast(part, src=rank, group=group)


xpu_communicator.dist = Collectives()


class EmulatedXpuCommunicator(XpuCommunicator):
    """XPU's own, with no other method; its name makes vLLM import this module."""
