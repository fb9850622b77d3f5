# SPDX-License-Identifier: Apache-2.0
"""Fail unless this Python has exactly the versions that are pinned beside this file and
none of the distributions that the arguments name."""

import sys
from importlib.metadata import distributions
from pathlib import Path

FILES = ("constraints.txt", "runtime.txt")


def problems(folder: Path, removed: list[str]) -> list[str]:
    """What is not as the files of `folder` pin it, and what is still there."""
    found = {
        each.name.lower().replace("_", "-"): each.version for each in distributions()
    }
    lines = [
        line for name in FILES for line in (folder / name).read_text().splitlines()
    ]
    pins = [line.split("==") for line in lines if "==" in line and line[0] != "#"]
    wrong = [
        f"{name} is {found.get(name, 'missing')}, not {pin}"
        for name, pin in pins
        if found.get(name) != pin
    ]
    return wrong + [f"{name} is still there" for name in removed if name in found]


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(__file__).parent, sys.argv[1:])) or 0)
