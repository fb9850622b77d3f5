# SPDX-License-Identifier: Apache-2.0
"""Models of a base that have code for each platform, but none for XPU."""

import re
from pathlib import PurePosixPath

from xpustack.core.repository import Repository

FOLDER = "vllm/models"
_PLATFORMS = ("nvidia", "amd")
_REFUSAL = re.compile(r"is_xpu\(\):\n\s+raise\b")


def models_without_xpu(git: Repository, tree: str) -> dict[str, str]:
    """The models below `vllm/models` that have a folder of another platform, and whose
    `__init__.py`, which chooses among the platforms, does not offer XPU one.

    Returns:
        The reason by the model's name.
    """
    files = git.files(tree, [FOLDER])
    isolated = {
        path.parts[2]
        for path in map(PurePosixPath, files)
        if len(path.parts) > 4 and path.parts[3] in _PLATFORMS
    }
    entries = {name: files.get(f"{FOLDER}/{name}/__init__.py") for name in isolated}
    blobs = git.blobs(entry.blob for entry in entries.values() if entry is not None)
    found = {}
    for name, entry in sorted(entries.items()):
        text = blobs[entry.blob].decode("utf-8", "replace") if entry is not None else ""
        if "xpu" not in text.lower():
            found[name] = "its __init__.py does not name XPU"
        elif _REFUSAL.search(text):
            found[name] = "its __init__.py refuses XPU"
    return found
