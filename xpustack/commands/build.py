# SPDX-License-Identifier: Apache-2.0
"""`xpustack build`: a release's wheel and the files beside it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xpustack.base import releases
from xpustack.core.errors import StackError
from xpustack.core.project import Project
from xpustack.release.ship import ReleaseArtifacts, ship
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)
from xpustack.terminal.selection import AllReleases, ReleaseName, selected


def build(
    release: ReleaseName = None,
    all_: AllReleases = False,
    to: Annotated[
        Path, typer.Option(help="Where a folder for each release is made.")
    ] = Path("dist"),
    sign_key: Annotated[
        Path | None,
        typer.Option(help="A private key (PEM) to sign the provenance with."),
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Build the wheel of a whole series, the same bytes each time.

    DIR/RELEASE gets the wheel, constraints.txt, pins.txt (hashes), runtime.txt,
    sbom.cdx.json, provenance.json, and the arguments of the images; with --sign-key
    also provenance.dsse.json. After a failure it gets none of them."""
    with answering("build", as_json) as answer:
        wheels: list[ReleaseArtifacts] = []
        with showing_progress() as progress, using_cache() as cache:
            project = Project.find()
            pinned = releases.load(project)
            for chosen in selected(pinned, release, all_, "build"):
                try:
                    wheel = ship(
                        project,
                        cache,
                        chosen,
                        to,
                        private_key=sign_key,
                        offline=offline,
                        progress=progress,
                    )
                except StackError as problem:
                    answer.fail(problem)
                else:
                    wheels.append(wheel)
        answer.data = {"built": [_to_json(wheel) for wheel in wheels]}
        for wheel in wheels:
            answer.say(f"{wheel.release}: vllm {wheel.version} in {wheel.directory}")
            answer.say(*(f"{digest}  {name}" for name, digest in wheel.files.items()))


def _to_json(wheel: ReleaseArtifacts) -> dict[str, Any]:
    return {
        "release": wheel.release,
        "version": wheel.version,
        "directory": str(wheel.directory),
        "wheel": wheel.wheel,
        "files": dict(wheel.files),
        "seconds": round(wheel.seconds, 1),
    }
