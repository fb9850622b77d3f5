# SPDX-License-Identifier: Apache-2.0
"""Byte code that the installed trees share: compiled here, once per content.

The byte code that Python writes during a test only shows which modules are imported.
This process compiles what trees get, from the verified source. It contains the
source's hash, which Python compares on import.
"""

import hashlib
import importlib.util
import marshal
import os
import secrets
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from xpustack.builds.build import Build, manifest_of
from xpustack.builds.site import BYTE_CODE, Manifest
from xpustack.core.cache import Cache, atomic_file, writing
from xpustack.core.contents import Content

_CHECKED_HASH = 0b11
_SUFFIX = f".{sys.implementation.cache_tag}.pyc"


def provide(cache: Cache, build: Build) -> int:
    """Link the known byte code of a tree's modules into the tree, and remove any
    other byte code. Call this before the tree is run.

    Returns:
        How many modules have byte code now.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    manifest = manifest_of(cache, build.key)
    if manifest is None:
        return 0
    index = load_index(cache)
    # Two checks may begin with one tree, the tree after a step and before the next.
    with cache.lock(f"bytecode-{build.key}"), writing(build.installed):
        for module, path in _present(build.installed):
            source = manifest.members.get(module) if module else None
            content = index.get(source.sha256) if source else None
            if content is None or not cache.verifier.is_intact(path, content):
                # A test that runs in this tree may have renamed its own file meanwhile.
                path.unlink(missing_ok=True)
        return _link(cache, build.installed, manifest, index)


def collect(cache: Cache, build: Build) -> int:
    """Compile the imported modules of a tree for which there is no shared byte code
    yet. Call this after the tree was run.

    Returns:
        How many modules were compiled.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    manifest = manifest_of(cache, build.key)
    if manifest is None:
        return 0
    index = load_index(cache)
    new: dict[str, Content] = {}
    with writing(cache.contents.root):
        for module, _ in _present(build.installed):
            source = manifest.members.get(module) if module else None
            if module is None or source is None or source.sha256 in index | new:
                continue
            if (data := _compiled(cache, module, source)) is not None:
                new[source.sha256] = cache.contents.add(data)
    if new:
        with cache.lock("bytecode"):
            _save_index(cache, load_index(cache) | new)
    return len(new)


def load_index(cache: Cache) -> dict[str, Content]:
    """The byte code for this Python by its source's sha256; empty if the index is
    damaged."""
    try:
        sha256, _, data = _index_path(cache).read_bytes().partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() == sha256:
            return msgspec.json.decode(data, type=dict[str, Content])
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        pass
    return {}


def forget(cache: Cache, sources: Collection[str]) -> None:
    """Drop the byte code of all contents but `sources`, by their sha256."""
    if load_index(cache).keys() - set(sources):
        with cache.lock("bytecode"):
            index = load_index(cache)
            _save_index(cache, {name: index[name] for name in index if name in sources})


def _save_index(cache: Cache, index: dict[str, Content]) -> None:
    data = msgspec.json.encode(index)
    with atomic_file(_index_path(cache)) as file:
        file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def _index_path(cache: Cache) -> Path:
    magic = importlib.util.MAGIC_NUMBER.hex()
    return cache.bytecode / f"{sys.implementation.cache_tag}-{magic}.json"


def _present(site: Path) -> Iterator[tuple[str | None, Path]]:
    """The byte code files in a tree, each after the path of its module; None instead
    of the path if this Python would not use the file's name."""
    for folder, folders, names in os.walk(site):
        if os.path.basename(folder) != BYTE_CODE:
            continue
        folders.clear()
        parent = Path(folder).parent.relative_to(site).as_posix()
        for name in names:
            stem = name.removesuffix(_SUFFIX)
            module = f"{parent}/{stem}.py".removeprefix("./")
            yield (module if stem != name else None), Path(folder, name)


def _link(
    cache: Cache, site: Path, manifest: Manifest, index: dict[str, Content]
) -> int:
    count = 0
    for module, source in manifest.members.items():
        content = index.get(source.sha256) if module.endswith(".py") else None
        if content is None or not cache.contents.holds(content):
            continue
        count += 1
        folder, _, name = module.rpartition("/")
        target = site / folder / BYTE_CODE / f"{name.removesuffix('.py')}{_SUFFIX}"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            temporary = target.with_name(f".{secrets.token_hex(8)}")
            cache.contents.link(content, temporary)
            os.replace(temporary, target)
    return count


def _compiled(cache: Cache, module: str, source: Content) -> bytes | None:
    """A module's byte code, to be checked against its source's hash; None if the
    content is damaged, or does not compile."""
    path = cache.contents.path(source)
    if not cache.verifier.is_intact(path, source):
        return None
    data = path.read_bytes()
    try:
        code = compile(data, module, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        return None
    flags = _CHECKED_HASH.to_bytes(4, "little")
    digest = importlib.util.source_hash(data)
    return importlib.util.MAGIC_NUMBER + flags + digest + marshal.dumps(code)
