# SPDX-License-Identifier: Apache-2.0
"""A tree that differs from an earlier one only in modules: its installed files are a
copy of the earlier tree's with the changed modules.

The build copies such modules into the wheel unchanged, and writes the version into
METADATA and `_version.py`. One copy per run is compared with a real build.
"""

import re
from functools import cache
from pathlib import Path, PurePosixPath

from stack.base.store import Store
from stack.builds.installed import Build, Files, byte_code_path, manifest_of
from stack.core.repository import Repository
from stack.series.tree import Tree

MODULE = re.compile(r"vllm/(?:[^/]+/)*[^/]+\.py")
BUILD_SCRIPTS = ("CMakeLists.txt", "MANIFEST.in", "pyproject.toml", "setup.py")
_VERSION = "vllm/_version.py"


def origin_of(git: Repository, tree: Tree, version: str) -> Tree | None:
    """The tree whose installed files `tree` copies; None if `tree` is really built.

    The build backend builds the base, the whole series, and each tree whose step
    touches files other than modules of vLLM that take no part in the build.

    Args:
        version: the version of the build of `tree`.
    """
    if not re.search(r"\.step\d+$", version):
        return None
    scripts = build_scripts(git, tree.base.tree_id)
    origin = tree
    for step_tree in tree.applied:
        if any(takes_part(path, scripts) for path in step_tree.changed):
            break
        origin = step_tree.parent
    return None if origin is tree else origin


@cache
def takes_part(path: str, scripts: str) -> bool:
    """Whether a build does more with the file `path` than copy it into the wheel.

    Args:
        scripts: the text of the `build_scripts`.
    """
    if not MODULE.fullmatch(path):
        return True
    if PurePosixPath(path).name not in scripts:
        return False
    # `vllm/envs.py`, `"vllm", "envs.py"` and `"vllm" / "envs.py"` all name it.
    between = r"""["']?\s*[,/]\s*["']?"""
    name = between.join(re.escape(part) for part in path.split("/"))
    return bool(re.search(rf"(?<![\w./]){name}(?![\w.])", scripts))


@cache
def build_scripts(git: Repository, tree_id: str) -> str:
    """The text of the files of a tree that may name a module which takes part in
    the build itself."""
    blobs = [entry.blob for entry in git.files(tree_id, BUILD_SCRIPTS).values()]
    contents = git.blobs(blobs) if blobs else {}
    return "\n".join(contents[blob].decode("utf-8", "replace") for blob in blobs)


def copied(store: Store, old: tuple[Tree, Build], new: Tree, version: str) -> Files:
    """The files of `new` as `version`.

    Args:
        old: the tree to copy, and its build.

    Raises:
        OSError: reading the build is denied.
    """
    tree, origin = old
    changes = store.git.changes(tree.tree_id, new.tree_id)
    blobs = store.git.blobs(change.new.blob for change in changes if change.new)
    changed = {change.path for change in changes}
    changed |= set(map(byte_code_path, {*changed, _VERSION}))
    files: Files = {
        path: f"{origin.installed}/{path}"
        for path, sha256 in (manifest_of(store.cache, origin.key) or {}).items()
        if sha256 and path not in changed
    }
    files |= {change.path: blobs[change.new.blob] for change in changes if change.new}
    old_home, home = (f"vllm-{text}.dist-info/" for text in (origin.version, version))
    files = {path.replace(old_home, home): files[path] for path in files}
    local = re.compile(rf"{re.escape(origin.version.partition('+')[2])}(?!\d)")
    for path in (f"{home}METADATA", _VERSION):
        if isinstance(place := files.get(path), str):
            text = Path(place).read_text("utf-8")
            text = local.sub(version.partition("+")[2], text)
            files[path] = text.encode()
    return files
