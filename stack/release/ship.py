# SPDX-License-Identifier: Apache-2.0
"""Build a release for deployers: one wheel of the whole series, and beside it its
constraints, bill of materials and provenance, written atomically."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from stack.base.index import PipConfiguration
from stack.base.releases import Release
from stack.base.store import Store
from stack.builds import wheel
from stack.builds.build import (
    backend_server,
    build_variables,
    build_version,
    build_wheel,
    private_places,
)
from stack.core.cache import Cache, replace_dir
from stack.core.errors import CheckFailed, UsageError, concerning
from stack.core.files import not_ours
from stack.core.markdown import rendered
from stack.core.process import Runner
from stack.core.project import Project
from stack.release import inputs
from stack.release.inputs import WheelBuild
from stack.release.provenance import provenance
from stack.release.resource import PinnedDistribution, sha256_of
from stack.release.runtime import base_runtime, with_hashes
from stack.release.sbom import sbom
from stack.series.apply import trees
from stack.series.patch import load_series
from stack.series.revision import require_recorded

CONSTRAINTS = "constraints.txt"
PINS = "pins.txt"
RUNTIME = "runtime.txt"
SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.json"
INSTALL = "install.sh"
IMAGE = "Containerfile"
OFFICIAL_IMAGE = "official.Containerfile"
INSTALLED = "pinned.py"
"""Says whether an environment has the pinned versions."""
STARTERS = ("require_key.py", "serve.sh")
"""How the images start: what asks for the key, and what gives it to `vllm serve`."""
HEALTH = "served.py"
"""The images' health check."""
_COPIED = (INSTALLED, HEALTH, *STARTERS)
_RENDERED = (CONSTRAINTS, PINS, RUNTIME, INSTALL, IMAGE)
COMPANION_FILES = (*_RENDERED, OFFICIAL_IMAGE, *_COPIED, SBOM, PROVENANCE)
"""The files beside a wheel; the second image only where upstream publishes one."""


def files(build: WheelBuild) -> dict[str, bytes]:
    """Every file of the release, by name, the wheel first."""
    official = (OFFICIAL_IMAGE,) if build.runtime.official else ()
    names = (*_RENDERED, *official)
    texts = {name: rendered("stack.release", name, vars(build)) for name in names}
    here = Path(__file__).parent
    texts |= {name: (here / name).read_text("utf-8") for name in _COPIED}
    texts[SBOM] = sbom(build)
    companions = {name: text.encode() for name, text in texts.items()}
    subjects = {build.name: build.digest} | {
        name: sha256_of(data) for name, data in sorted(companions.items())
    }
    statement = provenance(build, subjects, _variables(build.version))
    return {build.name: build.data, **companions, PROVENANCE: statement.encode()}


@dataclass(frozen=True)
class ReleaseArtifacts:
    """The written files: the sha256 of each file in `directory`, by name."""

    release: str
    version: str
    directory: Path
    wheel: str
    files: Mapping[str, str]
    seconds: float


def build_release_wheel(
    runner: Runner, project: Project, cache: Cache, release: Release
) -> WheelBuild:
    """Build the whole series of a release anew, without any earlier build.

    Raises:
        StackError: as `trees`, `inputs` and `build.build_wheel`.
        UsageError: the series is empty, so there is nothing to build.
        CheckFailed: the wheel names a directory of this machine.
    """
    store = Store(cache)
    series = trees(store, project, release)
    steps = tuple(tree.step for tree in series.steps)
    if not steps:
        raise UsageError(
            "the release has no steps yet: its wheel would be upstream's own",
            release=release.name,
            path=project.series_dir(release.name),
            hint="xpustack status",
        )
    parts = tuple(inputs.inputs(project, release, steps))
    runtime = base_runtime(store, series.base)
    version = build_version(series.tip, len(steps))
    cache.progress(f"building vllm {version}")
    with (
        concerning(release.name, series.tip.slug),
        cache.scratch(in_memory=True) as work,
        closing(backend_server(runner)) as server,
    ):
        name, contents = build_wheel(server, store, series.tip, version, work)
        leaks = wheel.leaks(contents, [place for place, _ in private_places(work)])
    if leaks:
        raise CheckFailed(
            "the wheel names directories of this machine",
            release=release.name,
            detail=leaks[:20],
        )
    return WheelBuild(
        release,
        version,
        name,
        wheel.canonical(contents),
        contents,
        series.tip,
        steps,
        parts,
        runtime,
        inputs.tool(),
        inputs.machine(runner),
    )


def ship(
    project: Project, cache: Cache, release: Release, directory: Path
) -> ReleaseArtifacts:
    """Make `directory/<release>` with the wheel and the files beside it.

    The folder appears atomically and replaces an earlier one of `ship`. Offline,
    pins.txt has no hashes of torch, Triton and the kernels.

    Raises:
        UsageError: the folder holds something that is not ours.
        EnvironmentProblem: the disk is full, or writing there is denied.
        SeriesError: the series changed since its revision was recorded.
        StackError: as `build_release_wheel`.
    """
    begin = time.monotonic()
    runner = Runner()
    require_recorded(project, release, load_series(project, release.name))
    target = directory.absolute() / release.name
    _require_ours(target, release)
    with replace_dir(target) as temporary:
        build = build_release_wheel(runner, project, cache, release)
        if not cache.offline:
            cache.progress("asking the index for hashes")
            build = with_announced_hashes(build)
        made = files(build)
        for name, data in made.items():
            (temporary / name).write_bytes(data)
    return ReleaseArtifacts(
        release.name,
        build.version,
        target,
        build.name,
        {name: sha256_of(data) for name, data in made.items()},
        round(time.monotonic() - begin, 1),
    )


def with_announced_hashes(build: WheelBuild) -> WheelBuild:
    """A build with the hashes of its pins that pip's indexes announce."""
    index = PipConfiguration.of_this_machine().index()
    return with_pins(build, with_hashes(build.runtime.pins, index))


def with_pins(build: WheelBuild, pins: Iterable[PinnedDistribution]) -> WheelBuild:
    """A build with the same pins, their hashes included."""
    return replace(build, runtime=replace(build.runtime, pins=tuple(pins)))


def with_written_hashes(
    pins: Sequence[PinnedDistribution], text: str
) -> list[PinnedDistribution]:
    """`pins` with their hashes in the text of a `pins.txt`."""
    hashes: dict[str, tuple[str, ...]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if words and not line.startswith("#"):
            options = (word.removeprefix("--hash=sha256:") for word in words[1:])
            hashes[words[0]] = tuple(options)
    return [replace(pin, hashes=hashes.get(pin.requirement, ())) for pin in pins]


def _variables(version: str) -> dict[str, str]:
    """The build's variables without this machine's directories."""
    variables = build_variables(Path("/"), version)
    prefix_map = "-ffile-prefix-map=<directory of the build or of Python>=<its name>"
    linker = "<Python's own, without the directories of Python>"
    return variables | {
        "CFLAGS": prefix_map,
        "CXXFLAGS": prefix_map,
        "TMPDIR": "<new>",
        "LDSHARED": linker,
        "LDCXXSHARED": linker,
    }


def _require_ours(target: Path, release: Release) -> None:
    own = f"vllm-{release.version}+xpu.dsv4."
    names = [path.name for path in target.iterdir()] if target.is_dir() else []
    if not all(name in COMPANION_FILES or name.startswith(own) for name in names):
        raise not_ours(target, release.name, "build")
