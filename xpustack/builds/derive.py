# SPDX-License-Identifier: Apache-2.0
"""Derives an installed tree from an earlier one if only Python files differ.

The build copies such files into the wheel unchanged. In addition, the members that
name the version get the new one. Everything else is linked.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath

from xpustack.builds.site import Manifest, with_record
from xpustack.core.contents import Content, Contents
from xpustack.core.repository import EXECUTABLE, PLAIN, Change, Repository
from xpustack.series.tree import Tree

MODULE = re.compile(r"vllm/(?:[^/]+/)*[^/]+\.py")
BUILD_SCRIPTS = ("CMakeLists.txt", "MANIFEST.in", "pyproject.toml", "setup.py")


class NotDerivable(Exception):
    """Why only the build backend can tell what the tree's wheel holds."""


def origin_of(git: Repository, tree: Tree, version: str) -> Tree | None:
    """The tree from whose wheel `tree` is derived; None if `tree` is really built.

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


def derive_manifest(
    git: Repository,
    contents: Contents,
    old: Tree,
    source: Manifest,
    source_key: str,
    new: Tree,
    version: str,
) -> Manifest:
    """The manifest of `new` as `version`, derived from that of `old`.

    Args:
        source: the manifest of `old`; `source_key` is its build's key.

    Raises:
        NotDerivable: the trees differ in more than modules that a build copies.
        OSError: the disk is full, writing there is denied, or a content is damaged.
    """
    changes = list(_changes(git, old, new))
    _require_modules(git, source, old, changes)
    members = dict(source.members)
    blobs = git.blobs(change.new.blob for change in changes if change.new)
    for change in changes:
        if change.new is None:
            del members[change.path]
        else:
            members[change.path] = contents.add(blobs[change.new.blob])
    for path in source.embedding:
        members[path] = _with_version(contents, members[path], source.version, version)
    home = next(path for path in members if path.endswith(".dist-info/METADATA"))
    old_home = home.removesuffix("/METADATA")
    new_home = old_home.replace(source.version, version)
    members = {
        new_home + path.removeprefix(old_home)
        if path.startswith(old_home + "/")
        else path: content
        for path, content in members.items()
    }
    own, text = with_record(members, new_home)
    members[own] = contents.add(text)
    embedding = tuple(
        new_home + path.removeprefix(old_home)
        if path.startswith(old_home + "/")
        else path
        for path in source.embedding
    )
    return Manifest(version, source_key, embedding, members)


def members_with_version(version: str, members: dict[str, bytes]) -> tuple[str, ...]:
    """Which members but RECORD name `version`, or its part after the `+`."""
    local = _local(version).encode()
    return tuple(
        sorted(
            path
            for path, data in members.items()
            if local in data and not path.endswith(".dist-info/RECORD")
        )
    )


def _local(version: str) -> str:
    return version.partition("+")[2] or version


def _with_version(contents: Contents, content: Content, old: str, new: str) -> Content:
    data = contents.path(content).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise NotDerivable("a binary file of the wheel contains the version") from None
    text = re.sub(rf"{re.escape(_local(old))}(?!\d)", lambda _: _local(new), text)
    return contents.add(text.encode(), executable=content.executable)


def _changes(git: Repository, old: Tree, new: Tree) -> Iterator[Change]:
    """Every path at which two trees differ.

    Raises:
        NotDerivable: a path is not a plain file in both.
    """
    for change in git.changes(old.tree_id, new.tree_id):
        modes = {entry.mode for entry in (change.old, change.new) if entry}
        # setuptools gives every module one mode, whatever the tree says.
        if not modes <= {PLAIN, EXECUTABLE}:
            raise NotDerivable(f"{change.path} is not a plain file")
        yield change


def _require_modules(
    git: Repository, source: Manifest, old: Tree, changes: list[Change]
) -> None:
    scripts = build_scripts(git, old.tree_id)
    folders = {str(PurePosixPath(path).parent) for path in source.members}
    packages = {
        str(PurePosixPath(change.path).parent)
        for change in changes
        if change.old is None and change.path.endswith("/__init__.py")
    }
    for change in changes:
        path = PurePosixPath(change.path)
        if change.path in source.embedding or takes_part(change.path, scripts):
            raise NotDerivable(f"{path} takes part in the build")
        if change.old is None:
            folder = path.parent
            while str(folder) not in folders:
                if str(folder) not in packages:
                    raise NotDerivable(f"{folder} is new and not a package")
                folder = folder.parent
        elif change.path not in source.members:
            raise NotDerivable(f"{path} is not in the wheel of {old.name}")
