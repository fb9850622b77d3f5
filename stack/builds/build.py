# SPDX-License-Identifier: Apache-2.0
"""Builds the XPU wheel of a tree and installs its files into the cache."""

import hashlib
import os
import re
import shlex
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

from stack.base.store import Store
from stack.builds import torch_config, wheel
from stack.builds.copy import copied, origin_of
from stack.builds.installed import (
    SITE,
    Build,
    damage,
    from_wheel,
    install,
    manifest_of,
    shared,
)
from stack.core import fingerprint
from stack.core.cache import Cache, count_as_used, replace_dir, writing
from stack.core.checkout import check_out
from stack.core.errors import CheckFailed, EnvironmentProblem, concerning
from stack.core.process import Runner, clean_environment
from stack.forks.server import Server
from stack.series.tree import Tree

TIMEOUT = 900.0
BACKEND = "setuptools.build_meta"
"""The build backend of every release; steptest/server.py imports it ahead."""
_BACKEND = f"""\
import sys
from {BACKEND} import build_wheel
options = {{"--global-option": "--quiet", "--build-option": sys.argv[2:]}}
build_wheel(sys.argv[1], options)
"""
"""What PEP 517 asks of the backend; one line for each of 3,000 files says nothing."""
_SCRIPT = "backend.py"
# The first moment that a zip archive can hold.
SOURCE_DATE_EPOCH = "315532800"
# The releases' one extension asks for this limited API; upstream's own release
# wheels are tagged in the same way, so that one wheel serves later Pythons too.
LIMITED_API = "cp311"
NO_COMPILER = re.compile(
    r"CMAKE_CXX_COMPILER not set|not\s+able\s+to\s+compile\s+a\s+simple\s+test"
    r"|error: command '.*' failed: No such file or directory"
)
"""The messages of CMake and setuptools when there is no working compiler."""


def build_version(tree: Tree, last: int) -> str:
    """`<release>+xpu.dsv4.<revision>`, with `.step<k>` unless `tree` holds all
    `last` steps of its series. The version of a clone has a `+` already."""
    mark = "." if "+" in tree.release.version else "+"
    version = f"{tree.release.version}{mark}xpu.dsv4.{tree.release.revision}"
    return version if tree.index == last else f"{version}.step{tree.index}"


def expected_build(store: Store, tree: Tree, version: str) -> Build:
    """The build that a tree would have: its key is a hash of the tree, its origin and
    the recipe. Its `installed` may be absent, and is not verified."""
    origin = origin_of(store.git, tree, version)
    key = fingerprint.digest(
        tree=tree.tree_id,
        origin=origin.tree_id if origin is not None else "",
        version=version,
        tool=fingerprint.tool("builds.build"),
        environment=fingerprint.lock(),
    )
    return Build(key, version, store.cache.builds / key / SITE, 0.0, True)


def found(build: Build) -> bool:
    """Whether an earlier run left this build. Its files are not verified: `build` does
    that, before they are run."""
    count_as_used(build.installed.parent)
    return build.installed.is_dir()


def backend_server(runner: Runner) -> Server:
    """A server for builds alone: that of step tests has imported more."""
    return Server(runner, [BACKEND])


def build(server: Server, store: Store, tree: Tree, version: str) -> Build:
    """Install `tree` as `version`, unless it is already installed and undamaged.

    Raises:
        CheckFailed: the build fails, or yields a wheel of another version.
        EnvironmentProblem: the disk is full, or a program is missing.
        Stopped: the server's runner was stopped; no partial result is left.
    """
    cache, planned = store.cache, expected_build(store, tree, version)
    if planned.installed.parent.is_dir():
        problem = _problem(cache, planned)
        if problem is None:
            return planned
        cache.progress(f"building {tree.release.name} {tree.label} again: {problem}")
    origin = origin_of(store.git, tree, version)
    source = None
    if origin is not None:
        earlier = build_version(origin, tree.index)
        source = origin, build(server, store, origin, earlier)
    with cache.lock(f"build-{planned.key}"):
        if _problem(cache, planned) is None:
            return planned
        begin = time.monotonic()
        if source is None:
            files = shared(cache, really_built(server, store, tree, version))
        else:
            files = copied(store, source, tree, version)
        with replace_dir(planned.installed.parent) as home:
            install(cache, files, home)
    return replace(planned, seconds=time.monotonic() - begin, cached=False)


def _problem(cache: Cache, build: Build) -> str | None:
    """Why the build that an earlier run left cannot be used; None if it can."""
    home = build.installed.parent
    members = manifest_of(cache, build.key)
    if members is None:
        return "its manifest is damaged"
    with writing(home):
        problem = damage(cache, members, build.installed)
    if problem is None:
        count_as_used(home)
    return problem


def really_built(
    server: Server, store: Store, tree: Tree, version: str
) -> dict[str, bytes]:
    """The files of a tree by path, from a wheel that the build backend builds. RECORD,
    which nobody asks for it, is left out.

    Raises:
        CheckFailed: as `build`; or the wheel cannot be read, does not match its RECORD,
            or has files that an installer would move elsewhere.
        EnvironmentProblem, Stopped: as `build`.
    """
    with (
        concerning(tree.release.name, tree.slug),
        store.cache.scratch(in_memory=True) as work,
    ):
        _, archive = build_wheel(server, store, tree, version, work)
        problems = dict(archive.problems) or wheel.record_problems(archive)
        problems |= {
            name: "it would be installed elsewhere"
            for name in archive.members
            if ".data/" in name.partition("/")[0] + "/"
        }
        if problems:
            raise CheckFailed(
                "the build yields a wheel that cannot be installed",
                detail=[f"{name}: {problem}" for name, problem in problems.items()],
            )
    return {
        name: member.data
        for name, member in archive.members.items()
        if not name.endswith(".dist-info/RECORD")
    }


def compare(server: Server, store: Store, tree: Tree, build: Build) -> int:
    """Really build a copied tree and compare every member; return their number.

    Raises:
        CheckFailed: a member differs; or the build fails.
        EnvironmentProblem: the disk is full, or a program is missing.
        Stopped: the server's runner was stopped.
    """
    files = really_built(server, store, tree, build.version)
    real = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    copied = from_wheel(manifest_of(store.cache, build.key) or {})
    states = {
        name: "a real build does not install it"
        if name not in real
        else "only a real build installs it"
        if name not in copied
        else "its content differs"
        for name in sorted(real.keys() | copied.keys())
        if real.get(name) != copied.get(name)
    }
    if states:
        raise CheckFailed(
            "the copied tree differs from what a real build installs",
            release=tree.release.name,
            step=tree.slug,
            path=build.installed,
            detail=[f"{name}: {state}" for name, state in states.items()],
            hint="report it as a fault of stack/builds/copy.py",
        )
    return len(real)


def build_wheel(
    server: Server, store: Store, tree: Tree, version: str, work: Path
) -> tuple[str, wheel.Wheel]:
    """Build `tree` in the empty directory `work`; return the wheel's name and the
    wheel. The compiler writes neither the path of `work` nor those of this environment
    into its output.

    Raises:
        As `build`.
    """
    source = work / "vllm"
    check_out(store.cache, tree.tree_id, source)
    torch_config.write(work)
    _run_backend(server, store.cache, source, work, version)
    paths = list((work / "dist").glob("*.whl"))
    if len(paths) == 1:
        archive = wheel.read(paths[0])
        if archive.metadata.get("version") == version:
            return paths[0].name, archive
    raise CheckFailed(
        f"the build did not yield one wheel of version {version}",
        detail=[f"found: {path.name}" for path in paths] or ["found: none"],
    )


def build_variables(work: Path, version: str) -> dict[str, str]:
    """The environment variables that a build in `work` sets."""
    mapped = " ".join(
        f"-ffile-prefix-map={place}={name}" for place, name in private_places(work)
    )
    return {
        "VLLM_TARGET_DEVICE": "xpu",
        "VLLM_VERSION_OVERRIDE": version,
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
        "CMAKE_BUILD_TYPE": "Release",
        "CFLAGS": mapped,
        "CXXFLAGS": mapped,
        **_linkers(work),
        **torch_config.variables(work),
        "MAX_JOBS": "1",
        "TMPDIR": str(work),
    }


def _linkers(work: Path) -> dict[str, str]:
    """setuptools' link commands, without this interpreter's folders: an interpreter
    that was built in a home directory passes a run path to its libraries there."""
    private = [place for place, _ in private_places(work)]
    commands = {}
    for name, override in (("LDSHARED", "CC"), ("LDCXXSHARED", "CXX")):
        program, *arguments = shlex.split(str(sysconfig.get_config_var(name)))
        public = [
            argument
            for argument in arguments
            if not any(place in argument for place in private)
        ]
        command = [*shlex.split(os.environ.get(override, program)), *public]
        commands[name] = shlex.join(command)
    return commands


def private_places(work: Path) -> list[tuple[str, str]]:
    """Directories of this machine that no wheel may name, with a replacement for
    each. The longest come last, because GCC applies the last map that matches."""
    places = {
        str(work): "build",
        str(work.resolve()): "build",
        sys.prefix: "python",
        sys.base_prefix: "python",
        os.path.realpath(sys.prefix): "python",
        os.path.realpath(sys.base_prefix): "python",
    }
    # A shared prefix such as /usr says nothing about this machine.
    private = {place: name for place, name in places.items() if place.count("/") > 1}
    return sorted(private.items(), key=lambda item: (len(item[0]), item[0]))


def _run_backend(
    server: Server, cache: Cache, source: Path, work: Path, version: str
) -> None:
    """Let the build backend put a wheel of `source` into `work`/dist. pip would first
    ask it for the metadata, which takes a third of the time and says nothing new."""
    (work / "dist").mkdir()
    # Not in the tree, whose folders the backend must not find. What it prints is there,
    # too: if a build fills the memory that it is in, the reason can still be read.
    with cache.scratch() as home:
        (home / _SCRIPT).write_text(_BACKEND)
        result = server.complete(
            [
                *(str(home / _SCRIPT), str(work / "dist")),
                f"--py-limited-api={LIMITED_API}",
                # Its members are read here, and packed anew if it ships.
                "--compression=stored",
            ],
            cwd=source,
            env=clean_environment(**build_variables(work, version)),
            output=home / "output.txt",
            limit=TIMEOUT,
        )
    if result.returncode != 0:
        if NO_COMPILER.search(result.output):
            raise EnvironmentProblem(
                "the base has an extension, and there is no C++ compiler that works",
                detail=result.last_lines(20),
                hint="c++ --version",
            )
        raise CheckFailed(
            f"the build failed with exit status {result.returncode}",
            detail=result.last_lines(40),
        )
