# SPDX-License-Identifier: Apache-2.0
"""A folder in memory for trees that exist for seconds, where the machine has one."""

import os
import re
import stat
from pathlib import Path

FOLDER = Path("/dev/shm")
ROOM = 4 << 30
"""Bytes that must be free there and in memory."""


def folder_in_memory() -> Path | None:
    """This user's folder; None if the machine has none with room, or if no program may
    run there."""
    place = FOLDER / f"xpustack-{os.getuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status, system = place.lstat(), os.statvfs(place)
        meminfo = Path("/proc/meminfo").read_text("utf-8")
    except OSError:
        return None
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    memory = re.search(r"MemAvailable: +(\d+) kB", meminfo)
    free = system.f_bavail * system.f_frsize
    if memory is None or min(free, int(memory[1]) << 10) < ROOM:
        return None
    return place if own and not system.f_flag & os.ST_NOEXEC else None
