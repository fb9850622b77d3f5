# SPDX-License-Identifier: Apache-2.0
"""Limits of memory that a container may have, as Linux shows them."""

from pathlib import Path

Folders = dict[str, tuple[str, int | str, str, int]]
"""By folder: the files of the limit and of what is used, each with its GiB."""
LIMITS: dict[str, tuple[str, Folders, int | None]] = {
    "v2, own": ("0::/a/b", {"a/b": ("memory.max", 9, "memory.current", 4)}, 5),
    "v2, around": (
        "0::/a/b",
        {
            "a/b": ("memory.max", "max", "memory.current", 1),
            "a": ("memory.max", 6, "memory.current", 4),
        },
        2,
    ),
    "v2, a container's root": (
        "0::/",
        {"": ("memory.max", 8, "memory.current", 9)},
        0,
    ),
    "v1": (
        "3:cpu:/\n4:name=systemd:/a\n5:memory,hugetlb:/a",
        {"memory/a": ("memory.limit_in_bytes", 7, "memory.usage_in_bytes", 4)},
        3,
    ),
    "v1, seen from inside": (
        "4:memory:/not/here",
        {"memory": ("memory.limit_in_bytes", 7, "memory.usage_in_bytes", 4)},
        3,
    ),
    "none": ("0::/a", {"a": ("memory.max", "max", "memory.current", 4)}, None),
    "no cgroups": ("", {}, None),
}
"""By case: the process's own cgroup as Linux names it, the folders, and the GiB that
are left."""
CACHED = 1 << 20
"""Bytes of the file cache that a cgroup would give back."""


def lay_out(root: Path, own: str, folders: Folders) -> None:
    """Write `own` and the folder `cgroup` below `root`."""
    (root / "own").write_text(own + "\n" if own else "")
    for folder, (limit, most, usage, used) in folders.items():
        there = root / "cgroup" / folder
        there.mkdir(parents=True, exist_ok=True)
        most = most if most == "max" else int(most) << 30
        (there / limit).write_text(f"{most}\n")
        (there / usage).write_text(f"{int(used) << 30}\n")
        name = "total_inactive_file" if "limit" in limit else "inactive_file"
        (there / "memory.stat").write_text(f"anon 5\n{name} {CACHED}\n")
