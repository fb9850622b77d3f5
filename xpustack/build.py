# SPDX-License-Identifier: Apache-2.0
"""One XPU wheel of one tree, and that wheel installed beside an environment."""

import os
import re
import shlex
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xpustack import environment, torch_config
from xpustack.cache import Cache, atomic_dir
from xpustack.checkout import checkout
from xpustack.errors import CheckFailed, EnvironmentProblem
from xpustack.process import Completed, Runner, clean_environment
from xpustack.progress import Progress, silent
from xpustack.store import Store
from xpustack.tree import Tree

TIMEOUT = 900.0
RECIPE = ("build", "checkout", "process", "environment", "torch_config")
# The first moment that a zip archive can hold.
SOURCE_DATE_EPOCH = "315532800"
# The releases' one extension asks for this limited API; upstream's own release
# wheels are tagged in the same way, so that one wheel serves later Pythons too.
LIMITED_API = "cp311"
NO_COMPILER = re.compile(
    r"CMAKE_CXX_COMPILER not set|not\s+able\s+to\s+compile\s+a\s+simple\s+test"
    r"|error: command '.*' failed: No such file or directory"
)
"""What CMake and setuptools say where there is no compiler that works."""


@dataclass(frozen=True)
class Build:
    """A tree's wheel and the directory into which it is installed.

    `key` names the wheel's whole origin; `cached` says that nothing was done.
    """

    key: str
    version: str
    wheel: Path
    installed: Path
    seconds: float
    cached: bool


def version_of(tree: Tree, last: int) -> str:
    """`<release>+xpu.dsv4.<revision>`, with `.step<k>` unless `tree` holds all
    `last` steps of its series."""
    version = f"{tree.release.version}+xpu.dsv4.{tree.release.revision}"
    return version if tree.index == last else f"{version}.step{tree.index}"


def key_of(tree: Tree, version: str) -> str:
    return environment.digest(
        tree=tree.tree_id,
        version=version,
        tool=environment.tool(*RECIPE),
        environment=environment.lock(),
    )


def build(
    runner: Runner,
    cache: Cache,
    store: Store,
    tree: Tree,
    version: str,
    *,
    progress: Progress | None = None,
) -> Build:
    """Build and install `tree` as `version`, or find it built before.

    Raises:
        CheckFailed: pip fails, or the wheel is not the one that was asked for.
        EnvironmentProblem: no room, or a program is missing.
        Stopped: the runner was stopped; nothing half-done is left.
    """
    key = key_of(tree, version)
    home = cache.wheels / key
    found = _find(home)
    if found is not None:
        return Build(key, version, found, home / "site", 0.0, cached=True)
    with cache.lock(f"wheel-{key}", progress or silent):
        found = _find(home)
        if found is not None:
            return Build(key, version, found, home / "site", 0.0, cached=True)
        with cache.scratch() as work, atomic_dir(home) as target:
            wheel, seconds = make(runner, store, tree, version, work)
            seconds += _install(runner, tree, wheel, target / "site").seconds
            shutil.copyfile(wheel, target / wheel.name)
    found = _find(home)
    assert found is not None
    return Build(key, version, found, home / "site", seconds, cached=False)


def make(
    runner: Runner, store: Store, tree: Tree, version: str, work: Path
) -> tuple[Path, float]:
    """Build `tree` anew in the empty directory `work`; the wheel in it, and the
    seconds that pip took. What the compiler would note of `work` and of this
    environment's own directories is left out of what it writes.

    Raises:
        As `build`.
    """
    source = work / "vllm"
    checkout(store, tree, source)
    torch_config.write(work)
    made = _wheel(runner, tree, source, work, version)
    return _only_wheel(tree, work / "dist", version), made.seconds


def recipe(work: Path, version: str) -> dict[str, str]:
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
    """setuptools' commands that link, without the folders of this interpreter: one
    that was built in a home directory has its libraries' folder as a run path."""
    private = [place for place, _ in private_places(work)]
    commands = {}
    for name, chosen in (("LDSHARED", "CC"), ("LDCXXSHARED", "CXX")):
        program, *arguments = shlex.split(str(sysconfig.get_config_var(name)))
        kept = [
            argument
            for argument in arguments
            if not any(place in argument for place in private)
        ]
        command = [*shlex.split(os.environ.get(chosen, program)), *kept]
        commands[name] = shlex.join(command)
    return commands


def private_places(work: Path) -> list[tuple[str, str]]:
    """Directories of this machine that no wheel may name, longest last, because
    GCC obeys the last map that fits, and what stands for each."""
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


def _find(home: Path) -> Path | None:
    return next(home.glob("*.whl"), None) if home.is_dir() else None


def _wheel(
    runner: Runner, tree: Tree, source: Path, work: Path, version: str
) -> Completed:
    return _pip(
        runner,
        tree,
        [
            *("wheel", ".", "--no-deps", "--no-build-isolation"),
            *("--config-settings", f"--build-option=--py-limited-api={LIMITED_API}"),
            *("--wheel-dir", str(work / "dist")),
        ],
        cwd=source,
        extra=recipe(work, version),
    )


def _install(runner: Runner, tree: Tree, wheel: Path, site: Path) -> Completed:
    return _pip(
        runner,
        tree,
        [
            *("install", "--no-deps", "--no-compile", "--root-user-action=ignore"),
            *("--target", str(site), str(wheel)),
        ],
        cwd=wheel.parent,
        extra={},
    )


def _pip(
    runner: Runner,
    tree: Tree,
    arguments: list[str],
    *,
    cwd: Path,
    extra: Mapping[str, str],
) -> Completed:
    """pip with no configuration and no network; what it builds lies in `cwd`."""
    done = runner.run(
        [
            *(sys.executable, "-m", "pip", "--isolated", "--no-input", *arguments),
            *("--no-index", "--no-cache-dir", "--disable-pip-version-check"),
        ],
        cwd=cwd,
        env=clean_environment(**extra),
        timeout=TIMEOUT,
    )
    if done.returncode != 0:
        if NO_COMPILER.search(done.output):
            raise EnvironmentProblem(
                "the base has an extension, and there is no C++ compiler that works",
                release=tree.release.name,
                detail=done.last_lines(20),
                hint="c++ --version",
            )
        raise CheckFailed(
            f"pip {arguments[0]} failed with exit status {done.returncode}",
            release=tree.release.name,
            step=tree.step.slug if tree.step else None,
            detail=done.last_lines(40),
        )
    return done


def _only_wheel(tree: Tree, directory: Path, version: str) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) == 1:
        with zipfile.ZipFile(wheels[0]) as archive:
            metadata = [n for n in archive.namelist() if n.endswith("/METADATA")]
            text = archive.read(metadata[0]).decode() if metadata else ""
        if f"\nVersion: {version}\n" in text:
            return wheels[0]
    raise CheckFailed(
        f"the build did not yield one wheel of version {version}",
        release=tree.release.name,
        step=tree.step.slug if tree.step else None,
        detail=[f"found: {wheel.name}" for wheel in wheels] or ["found: none"],
    )
