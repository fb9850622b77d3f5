# SPDX-License-Identifier: Apache-2.0
"""A tree that differs from an earlier one only in modules: its installed files are a
copy of the earlier tree's with the changed modules.

The build copies such modules into the wheel unchanged, and writes the version into
METADATA and `_version.py`. One copy per run is compared with a real build.
"""

import re
from functools import cache
from pathlib import PurePosixPath

from xpustack.base.store import Store
from xpustack.builds import wheel
from xpustack.builds.installed import (
    Members,
    byte_code_path,
    store_files,
    without_byte_code,
)
from xpustack.core.repository import Repository
from xpustack.series.tree import Tree

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


def copied(
    store: Store, old: tuple[Tree, str, Members], new: Tree, version: str
) -> Members:
    """The members of `new` as `version`.

    Args:
        old: the tree to copy, its version and its members.

    Raises:
        OSError: the disk is full, writing there is denied, or a content is damaged.
    """
    cache = store.cache
    tree, old_version, members = old
    changes = store.git.changes(tree.tree_id, new.tree_id)
    changed = {path for change in changes for path in _with_byte_code(change.path)}
    blobs = store.git.blobs(change.new.blob for change in changes if change.new)
    files = {change.path: blobs[change.new.blob] for change in changes if change.new}
    old_home, home = (f"vllm-{text}.dist-info/" for text in (old_version, version))
    kept = {
        path.replace(old_home, home): content
        for path, content in members.items()
        if path not in changed
    }
    for path in (f"{home}METADATA", _VERSION):
        if path in kept:
            text = cache.contents.path(kept[path]).read_text("utf-8")
            files[path] = (
                _local_version(old_version)
                .sub(version.partition("+")[2], text)
                .encode()
            )
    kept |= store_files(cache, files)
    record = f"{home}RECORD"
    rows = {
        path: (content.sha256, content.size)
        for path, content in without_byte_code(kept).items()
        if path != record
    }
    return kept | store_files(cache, {record: wheel.record(rows, record)})


def _with_byte_code(path: str) -> tuple[str, str]:
    return path, byte_code_path(path)


def _local_version(version: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(version.partition('+')[2])}(?!\d)")
