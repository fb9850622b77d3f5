# SPDX-License-Identifier: Apache-2.0
"""Byte code that the installed trees share: compiled here, once per content.

What Python wrote beside a module while a test ran only tells which modules are
imported. The byte code that trees get is compiled by this process from the
verified source, names the source's hash, and Python compares that hash on import.
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
    """Give an installed tree the byte code that is known of its modules, and take
    away what this module did not make; to be called before the tree is run.

    Returns:
        How many modules have byte code now.

    Raises:
        EnvironmentProblem: no room, or no right, to write.
    """
    manifest = manifest_of(cache, build.key)
    if manifest is None:
        return 0
    known = load_index(cache)
    with writing(build.installed):
        for module, path in _present(build.installed):
            source = manifest.members.get(module) if module else None
            wanted = known.get(source.sha256) if source else None
            if wanted is None or not cache.verifier.is_intact(path, wanted):
                path.unlink()
        return _link_known(cache, build.installed, manifest, known)


def collect(cache: Cache, build: Build) -> int:
    """Compile the modules of a tree that were imported and have no byte code that
    trees share; to be called after the tree was run.

    Returns:
        How many modules were compiled.

    Raises:
        EnvironmentProblem: no room, or no right, to write.
    """
    manifest = manifest_of(cache, build.key)
    if manifest is None:
        return 0
    known = load_index(cache)
    new: dict[str, Content] = {}
    with writing(cache.contents.root):
        for module, _ in _present(build.installed):
            source = manifest.members.get(module) if module else None
            if module is None or source is None or source.sha256 in known | new:
                continue
            if (data := _compiled(cache, module, source)) is not None:
                new[source.sha256] = cache.contents.add(data)
    if new:
        with cache.lock("bytecode"):
            _save_index(cache, load_index(cache) | new)
    return len(new)


def load_index(cache: Cache) -> dict[str, Content]:
    """The contents that are byte code of this Python, by their source's sha256;
    empty where the index is damaged."""
    try:
        sha256, _, data = _index(cache).read_bytes().partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() == sha256:
            return msgspec.json.decode(data, type=dict[str, Content])
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        pass
    return {}


def forget(cache: Cache, sources: Collection[str]) -> None:
    """Drop the byte code of all contents but `sources`, by their sha256."""
    if load_index(cache).keys() - set(sources):
        with cache.lock("bytecode"):
            known = load_index(cache)
            _save_index(cache, {name: known[name] for name in known if name in sources})


def _save_index(cache: Cache, known: dict[str, Content]) -> None:
    data = msgspec.json.encode(known)
    with atomic_file(_index(cache)) as file:
        file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def _index(cache: Cache) -> Path:
    magic = importlib.util.MAGIC_NUMBER.hex()
    return cache.bytecode / f"{sys.implementation.cache_tag}-{magic}.json"


def _present(site: Path) -> Iterator[tuple[str | None, Path]]:
    """Each file of byte code in a tree, and its module's path in the tree; None
    where its name is not one that this Python gives."""
    for folder, folders, names in os.walk(site):
        if os.path.basename(folder) != BYTE_CODE:
            continue
        folders.clear()
        parent = Path(folder).parent.relative_to(site).as_posix()
        for name in names:
            stem = name.removesuffix(_SUFFIX)
            module = f"{parent}/{stem}.py".removeprefix("./")
            yield (module if stem != name else None), Path(folder, name)


def _link_known(
    cache: Cache, site: Path, manifest: Manifest, known: dict[str, Content]
) -> int:
    count = 0
    for module, source in manifest.members.items():
        wanted = known.get(source.sha256) if module.endswith(".py") else None
        if wanted is None or not cache.contents.holds(wanted):
            continue
        count += 1
        folder, _, name = module.rpartition("/")
        target = site / folder / BYTE_CODE / f"{name.removesuffix('.py')}{_SUFFIX}"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            temporary = target.with_name(f".{secrets.token_hex(8)}")
            cache.contents.link(wanted, temporary)
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
