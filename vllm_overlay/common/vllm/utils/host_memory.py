# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which host this is, and how much of its memory a process may still take."""

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Names the host: containers of one share its memory, whatever they are called."""


def free_host_memory() -> int:
    """Bytes that this process may still take: of the host, and of the memory limits of
    its cgroup and of those around it, whichever is least. A container may see the files
    of its own cgroup as those of the root."""
    free = [psutil.virtual_memory().available]
    for line in OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, names = CGROUPS / "memory", _CGROUP_V1
        elif not controllers:
            mount, names = CGROUPS, _CGROUP_V2
        else:
            continue
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                free += _left_in_cgroup(folder, *names)
    return min(free)


_CGROUP_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_CGROUP_V2 = "memory.max", "memory.current", "inactive_file"


def _left_in_cgroup(folder: Path, limit: str, usage: str, cache: str) -> list[int]:
    """What a cgroup has left, with the file cache that it would give back; empty if it
    has no limit."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        described = (folder / "memory.stat").read_text().split()
    except OSError:
        return []
    if most == "max":
        return []
    statistics = dict(zip(described[::2], map(int, described[1::2])))
    return [max(int(most) - used + statistics.get(cache, 0), 0)]
