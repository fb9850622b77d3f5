# SPDX-License-Identifier: Apache-2.0
"""`xpustack build` and `verify`: wheels with what lies beside them."""

import dataclasses
from pathlib import Path

from stack.base import releases
from stack.core.errors import CheckFailed, StackError, elsewhere
from stack.release.retired import build_retired
from stack.release.ship import ReleaseArtifacts, ship
from stack.release.verify import verify as verify_wheel
from stack.terminal.console import (
    AllReleases,
    Offline,
    ReleaseName,
    Reply,
    selected,
    working,
)


def build(
    release: ReleaseName = None,
    /,
    *,
    all_: AllReleases = False,
    to: Path = Path("dist"),
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Build the wheel of a whole series, the same bytes each time.

    DIR/RELEASE gets the wheel, constraints.txt, pins.txt (hashes), runtime.txt,
    sbom.cdx.json, provenance.json, two Containerfiles, and what installs, starts and
    probes the server. After a failure it gets none of them. A retired release is built
    by the stack of the last commit that has it, which is taken from git's history.

    Args:
        to: Where a folder for each release is made.
    """
    wheels: list[ReleaseArtifacts] = []
    with working(offline) as (project, cache):
        pinned = releases.load(project)
        old = pinned.retired_release(release or "")
        if old is not None and not all_:
            with elsewhere(to):
                wheels.append(build_retired(project, cache, old, to))
        else:
            for chosen in selected(pinned, release, all_, "build"):
                try:
                    with elsewhere(to):
                        wheels.append(ship(project, cache, chosen, to))
                except StackError as problem:
                    answer.fail(problem)
    answer.data = {"built": wheels}
    for wheel in wheels:
        answer.say(f"{wheel.release}: vllm {wheel.version} in {wheel.directory}")
        answer.say(*(f"{digest}  {name}" for name, digest in wheel.files.items()))


def verify(wheel: Path, /, *, offline: Offline = False, answer: Reply) -> None:
    """Build the wheel again and say, file by file, what differs.

    This compares the wheel's members and its own bytes, the files beside it, and
    the base, patches, overlay and kernels that its provenance names. A published
    wheel's vX.Y.Z.tar.gz has all these files. Exit code 0 means that all are the same,
    1 that the listed ones differ.

    Args:
        wheel: A wheel that xpustack build made.
    """
    with working(offline) as (project, cache):
        verdict = verify_wheel(project, cache, wheel)
    answer.data = {"verified": verdict.good, **dataclasses.asdict(verdict)}
    answer.say(*map(str, verdict.differences))
    answer.say(*(f"note: {note}" for note in verdict.notes))
    count = len({difference.file for difference in verdict.differences})
    answer.say(f"{wheel.name}: {f'{count} files differ' if count else 'verified'}")
    if not verdict.good:
        answer.exit_code = CheckFailed.exit_code
