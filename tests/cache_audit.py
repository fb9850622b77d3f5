# SPDX-License-Identifier: Apache-2.0
"""Whether a cache holds only whole things under their final names."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack.builds.installed import Members, damage, from_wheel, manifest_of
from stack.core.cache import Cache

VARYING = ("notes", "seconds")
"""Fields of a result that depend on the machine's load."""


@dataclass
class Holdings:
    """What a cache holds, and what is wrong with it.

    Attributes:
        results: the stored results by their keys, without what varies.
        builds: the files of the installed trees by their keys.
        faults: the entries that are not whole, and why.
    """

    results: dict[str, Any] = field(default_factory=dict)
    builds: dict[str, Members] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def audit(cache: Cache) -> Holdings:
    """Read everything that a cache shows under a final name, as a new run would."""
    cache = Cache(cache.root)
    held = Holdings()
    for path in _entries(cache.results, "*/*"):
        if (result := cache.results_get(path.stem)) is None:
            held.faults.append(f"result {path.stem} is damaged")
        else:
            held.results[path.stem] = {
                name: value for name, value in result.items() if name not in VARYING
            }
    for path in _entries(cache.builds, "*"):
        if (members := manifest_of(cache, path.name)) is None:
            held.faults.append(f"build {path.name} has no whole manifest")
            continue
        held.builds[path.name] = from_wheel(members)
        if (problem := damage(cache, members, path / "site")) is not None:
            held.faults.append(f"build {path.name}: {problem}")
    if cache.objects.is_dir():
        fsck = subprocess.run(
            ["git", "fsck", "--strict", "--no-dangling", "--no-progress"],
            cwd=cache.objects,
            capture_output=True,
            text=True,
        )
        if fsck.returncode:
            held.faults.append(f"objects: {fsck.stdout}{fsck.stderr}")
    return held


def _entries(folder: Path, pattern: str) -> Iterator[Path]:
    """What is not a temporary entry; their names start with a dot."""
    for path in sorted(folder.glob(pattern)):
        if not path.name.startswith("."):
            yield path
