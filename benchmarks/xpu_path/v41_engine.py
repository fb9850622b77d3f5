# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.xpu_path.v41_engine ORDER RESULT`: `e2e.engine` with V4.1's
tiny checkpoint, which is written there: its 38 MB do not compress."""

import json
import sys
from pathlib import Path

import torch

from e2e import checkpoint, engine, v41

FOLDER = Path("checkpoint-v4.1")


def main() -> None:
    """Write the checkpoint if no job did before, and serve the order."""
    if not FOLDER.is_dir():
        checkpoint.write(FOLDER, v41.V41(0))
    order = json.loads(Path(sys.argv[1]).read_text())
    order["model"] = str(FOLDER / "published")
    torch.save(engine.generate(order), sys.argv[2])


if __name__ == "__main__":
    main()
