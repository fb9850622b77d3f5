# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.written ORDER RESULT`: `proof.e2e.inside.engine`
with a checkpoint that is written there: its 38 to 700 MB do not compress."""

import fcntl
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from proof.e2e.checkpoints import checkpoint, dspark, v41, vision
from proof.e2e.inside import engine
from proof.e2e.running.asked import LONG, Long
from proof.e2e.twins import v41_vision

WRITERS: dict[str, Callable[[int], checkpoint.Writer]] = {
    "v4.1": v41.V41,
    "v4.1 with images": v41_vision.Images,
    "vision": vision.Vision,
    LONG: Long,
}


def main() -> None:
    """Serve the order."""
    order = json.loads(Path(sys.argv[1]).read_text())
    result = Path(sys.argv[2])
    order["model"] = folder_of(order, result)
    torch.save(engine.generate(order), result)


def folder_of(order: dict[str, Any], result: Path) -> str:
    """The published form of the order's checkpoint, which one of several processes
    writes."""
    folder = Path(f"checkpoint-{order['checkpoint']}")
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            checkpoint.write(folder, writer_of(order, result))
    return str(folder / "published")


def writer_of(order: dict[str, Any], result: Path) -> checkpoint.Writer:
    """A draft knows the texts of the job that `order` names, whose result is there."""
    if "known" not in order:
        return WRITERS[order["checkpoint"]](0)
    answer = torch.load(result.with_name(f"{order['known']}.pt"), weights_only=False)
    texts = (
        read + new
        for wave in zip(answer["read"], answer["tokens"], strict=True)
        for read, new in zip(*wave, strict=True)
    )
    return v41.V41(0, dspark.following(texts))


if __name__ == "__main__":
    main()
