# SPDX-License-Identifier: Apache-2.0
"""`picture.py BENCHMARK FILE`: the picture of a comparison, as SVG."""

import json
import sys
from pathlib import Path


def main(source: Path, target: Path) -> None:
    from benchmarks.plot import draw

    draw(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
