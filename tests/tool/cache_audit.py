# SPDX-License-Identifier: Apache-2.0
"""Whether a cache holds only whole things under their final names."""

import hashlib
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpustack.builds.build import manifest_of
from xpustack.builds.bytecode import load_index
from xpustack.builds.site import damage
from xpustack.core.cache import Cache
from xpustack.core.contents import FileVerifier

VARYING = ("notes", "seconds")
"""Fields of a result that depend on the machine's load."""


@dataclass
class Holdings:
    """What a cache holds, and what is wrong with it.

    Attributes:
        results: the stored results by their keys, without what varies.
        builds: the digests of the installed trees by their keys.
        faults: the entries that are not whole, and why.
    """

    results: dict[str, Any] = field(default_factory=dict)
    builds: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def audit(cache: Cache) -> Holdings:
    """Read everything that a cache shows under a final name."""
    held = Holdings()
    for path in _entries(cache.results, "*/*"):
        if (result := cache.results_get(path.stem)) is None:
            held.faults.append(f"result {path.stem} is damaged")
        else:
            held.results[path.stem] = {
                name: value for name, value in result.items() if name not in VARYING
            }
    for path in _entries(cache.builds, "*"):
        if (manifest := manifest_of(cache, path.name)) is None:
            held.faults.append(f"build {path.name} has no whole manifest")
            continue
        held.builds[path.name] = manifest.digest
        if (problem := damage(manifest, path / "site", FileVerifier())) is not None:
            held.faults.append(f"build {path.name}: {problem}")
    for path in _entries(cache.root / "files", "*/*"):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        mode = 0o555 if path.name.endswith("x") else 0o444
        if path.name.removesuffix("x") != sha256 or (
            stat.S_IMODE(path.stat().st_mode) != mode
        ):
            held.faults.append(f"content {path.name} is damaged")
    if any(_entries(cache.bytecode, "*")) and not load_index(cache):
        held.faults.append("the index of byte code is damaged")
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
