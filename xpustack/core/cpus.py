# SPDX-License-Identifier: Apache-2.0
"""How many CPUs this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable() -> int:
    """The CPUs that the scheduler may give this process, or fewer where a control
    group limits its time; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(math.floor(limit) for limit in _limits(_CGROUPS))]))


def _limits(root: Path, own: Path = Path("/proc/self/cgroup")) -> Iterator[float]:
    """How many CPUs' worth of time each control group (version 2) of this process
    allows. A container sees its own group as the root."""
    try:
        rows = own.read_text().splitlines()
    except OSError:
        return
    for row in rows:
        number, _, path = row.split(":", 2)
        if number == "0":
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                yield from _limit(folder / "cpu.max")
                if folder == root:
                    break


def _limit(file: Path) -> Iterator[float]:
    """The limit that a `cpu.max` sets: `<quota> <period>`, or `max <period>`."""
    try:
        quota, period = file.read_text().split()
        yield int(quota) / int(period)
    except (OSError, ValueError):
        return
