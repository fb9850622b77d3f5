# SPDX-License-Identifier: Apache-2.0
"""`all_reduce KIND FILE`: two ranks, which meet in FILE, add up a tensor each."""

import subprocess
import sys
from pathlib import Path

SIZES = (1, 4097, 1 << 22)


def add_up(kind: str, meeting: Path, rank: int) -> None:
    """Be one of the ranks.

    Raises:
        SystemExit: a sum is wrong.
    """
    import torch
    import torch.distributed as dist

    device = torch.device(kind, rank)
    getattr(torch, kind).set_device(device)
    dist.init_process_group(
        "xccl" if kind == "xpu" else "nccl",
        init_method=f"file://{meeting.absolute()}",
        rank=rank,
        world_size=2,
    )
    for size in SIZES:
        x = torch.full((size,), float(rank + 1), device=device)
        dist.all_reduce(x)
        getattr(torch, kind).synchronize()
        if not bool((x == 3).all()):
            raise SystemExit(f"an all-reduce of {size} numbers is wrong")
        print(f"all-reduce of {size} numbers: right", flush=True)
    dist.destroy_process_group()


def main(kind: str, meeting: str, *rank: str) -> int:
    """Start both ranks and wait for them, or be the one that is named."""
    if rank:
        add_up(kind, Path(meeting), int(rank[0]))
        return 0
    words = [sys.executable, "-m", "proof.on_device.all_reduce", kind, meeting]
    ranks = [subprocess.Popen([*words, number]) for number in "01"]
    return max(abs(started.wait()) for started in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
