# SPDX-License-Identifier: Apache-2.0
"""A release as it is handed out: one wheel of the whole series, and beside it what
it needs, what it is made of and where it comes from. All of it or nothing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xpustack.base.index import PipConfiguration
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds import wheel
from xpustack.builds.build import (
    build_variables,
    build_version,
    build_wheel,
    private_places,
)
from xpustack.core.cache import Cache, recover_dir, replace_dir
from xpustack.core.errors import CheckFailed, UsageError
from xpustack.core.process import Runner
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.release import inputs, provenance, sbom
from xpustack.release.constraints import (
    Pinned,
    base_texts,
    build_arguments,
    constraints,
    pinned,
    pins_with_hashes,
    runtime,
    with_hashes,
)
from xpustack.release.inputs import Input
from xpustack.series.apply import trees
from xpustack.series.patch import Step
from xpustack.series.tree import Tree

CONSTRAINTS = "constraints.txt"
PINS = "pins.txt"
SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.json"
ARGUMENTS = "container.args"
BESIDE = (CONSTRAINTS, PINS, SBOM, PROVENANCE, ARGUMENTS)
"""The files that lie beside a wheel."""


@dataclass(frozen=True)
class Derived:
    """A wheel that was just built, and all that the files beside it are made from.

    `data` is the wheel's canonical archive; `pins` have no hashes yet.
    """

    release: Release
    version: str
    name: str
    data: bytes
    wheel: wheel.Wheel
    tip: Tree
    steps: tuple[Step, ...]
    parts: tuple[Input, ...]
    pins: tuple[Pinned, ...]
    requirements: str
    dockerfile: str

    def files(
        self,
        pins: Sequence[Pinned],
        tool: Mapping[str, str],
        machine: Mapping[str, str],
    ) -> dict[str, bytes]:
        """Every file to hand out, by name, the wheel first.

        Args:
            pins: with the hashes that are to be written.
            tool, machine: what the provenance is to say of them.
        """
        digest = inputs.sha256_of(self.data)
        runs_on = runtime(self.requirements, self.dockerfile, self.release)
        texts = {
            CONSTRAINTS: constraints(self.release, self.version, pins),
            PINS: pins_with_hashes(pins),
            ARGUMENTS: build_arguments(self.name, pins, runs_on),
            SBOM: sbom.sbom(
                self.release,
                self.version,
                (self.name, digest),
                self.tip,
                self.steps,
                self.parts,
                pins,
                self.wheel.metadata.get("Requires-Dist", []),
            ),
        }
        made = {name: text.encode() for name, text in texts.items()}
        subjects = {self.name: digest} | {
            name: inputs.sha256_of(data) for name, data in sorted(made.items())
        }
        statement = provenance.provenance(
            self.release,
            self.version,
            subjects,
            self.tip,
            self.steps,
            self.parts,
            _variables(self.version),
            tool,
            machine,
        )
        return {self.name: self.data, **made, PROVENANCE: statement.encode()}


@dataclass(frozen=True)
class Shipped:
    """What was written: the sha256 of each file in `directory`, by name."""

    release: str
    version: str
    directory: Path
    wheel: str
    files: Mapping[str, str]
    seconds: float


def derive(
    runner: Runner,
    project: Project,
    cache: Cache,
    release: Release,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> Derived:
    """Build the whole series of a release anew; nothing built before is used.

    Raises:
        StackError: as `trees`, `inputs` and `build.build_wheel`.
        UsageError: the series is empty, so that there is nothing to hand out.
        CheckFailed: the wheel names a directory of this machine.
    """
    store = Store(cache)
    made = trees(store, project, release, offline=offline, progress=progress)
    steps = tuple(tree.step for tree in made.steps)
    if not steps:
        raise UsageError(
            "the release has no steps yet: its wheel would be upstream's own",
            release=release.name,
            path=project.series_dir(release.name),
            hint="xpustack status",
        )
    parts = tuple(inputs.inputs(project, release, steps))
    requirements, dockerfile = base_texts(store, made.base)
    version = build_version(made.tip, len(steps))
    progress(f"building vllm {version}")
    with cache.scratch() as work:
        built = build_wheel(runner, store, made.tip, version, work)
        found = wheel.read(built)
        leaking = wheel.leaks(found, [place for place, _ in private_places(work)])
    if leaking:
        raise CheckFailed(
            "the wheel names directories of this machine",
            release=release.name,
            detail=leaking[:20],
        )
    return Derived(
        release,
        version,
        built.name,
        wheel.canonical(found),
        found,
        made.tip,
        steps,
        parts,
        tuple(pinned(release, requirements)),
        requirements,
        dockerfile,
    )


def ship(
    project: Project,
    cache: Cache,
    release: Release,
    directory: Path,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> Shipped:
    """Make `directory/<release>` with the wheel and the files beside it.

    The folder appears when it is complete; one that `ship` made before is
    replaced. Offline, no hashes of torch, Triton and the kernels are known.

    Raises:
        UsageError: the folder holds something that is not ours.
        EnvironmentProblem: no room, or no right, to write it.
        StackError: as `derive`.
    """
    begin = time.monotonic()
    runner = Runner()
    target = directory.absolute() / release.name
    recover_dir(target)
    _require_ours(target, release)
    with replace_dir(target) as temporary:
        made = derive(
            runner, project, cache, release, offline=offline, progress=progress
        )
        pins = list(made.pins)
        if not offline:
            progress("asking the index for hashes")
            pins = with_hashes(pins, PipConfiguration.of_this_machine().index())
        files = made.files(pins, inputs.tool(), inputs.machine(runner))
        for name, data in files.items():
            (temporary / name).write_bytes(data)
    return Shipped(
        release.name,
        made.version,
        target,
        made.name,
        {name: inputs.sha256_of(data) for name, data in files.items()},
        time.monotonic() - begin,
    )


def known_hashes(pins: Sequence[Pinned], text: str) -> list[Pinned]:
    """`pins` with the hashes that the text of a `pins.txt` gives them."""
    found: dict[str, tuple[str, ...]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if words and not line.startswith("#"):
            options = (word.removeprefix("--hash=sha256:") for word in words[1:])
            found[words[0]] = tuple(options)
    return [replace(pin, hashes=found.get(pin.requirement, ())) for pin in pins]


def _variables(version: str) -> dict[str, str]:
    """The build's variables without this machine's directories."""
    told = build_variables(Path("/"), version)
    mapped = "-ffile-prefix-map=<directory of the build or of Python>=<its name>"
    linker = "<Python's own, without the directories of Python>"
    return told | {
        **{"CFLAGS": mapped, "CXXFLAGS": mapped, "TMPDIR": "<new>"},
        **{"LDSHARED": linker, "LDCXXSHARED": linker},
    }


def _require_ours(target: Path, release: Release) -> None:
    for place in (target, *target.parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(
                    "not a directory", path=place, hint="choose another directory"
                )
            break
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    foreign = sorted(
        name
        for name in names - set(BESIDE)
        if not name.startswith(f"vllm-{release.version}+xpu.dsv4.")
    )
    if foreign:
        raise UsageError(
            "the directory holds files that xpustack build did not make",
            release=release.name,
            path=target,
            detail=foreign[:10],
            hint="choose another directory with --to",
        )
