# SPDX-License-Identifier: Apache-2.0
"""`all_reduce.py KIND FOLDER RANK`: one of two ranks that add up a tensor each."""

import sys
from pathlib import Path

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    kind, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    device = torch.device(kind, rank)
    getattr(torch, kind).set_device(device)
    dist.init_process_group(
        "xccl" if kind == "xpu" else "nccl",
        init_method=f"file://{folder.absolute() / 'meeting'}",
        rank=rank,
        world_size=2,
    )
    for size in (1, 4097, 1 << 22):
        x = torch.full((size,), float(rank + 1), device=device)
        dist.all_reduce(x)
        getattr(torch, kind).synchronize()
        if not bool((x == 3).all()):
            raise SystemExit(f"an all-reduce of {size} numbers is wrong")
        print(f"all-reduce of {size} numbers: right", flush=True)
    dist.destroy_process_group()
