# SPDX-License-Identifier: Apache-2.0
"""`xpustack build`: a release's wheel and what lies beside it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xpustack.base import releases
from xpustack.core.errors import StackError, UsageError
from xpustack.core.project import Project
from xpustack.release import ship
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)


def build(
    release: Annotated[str | None, typer.Argument(help="Such as v0.22.1.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every release.")] = False,
    to: Annotated[
        Path, typer.Option(help="Where a folder for each release is made.")
    ] = Path("dist"),
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Build the wheel of a whole series, the same bytes each time.

    DIR/RELEASE gets the wheel, constraints.txt, pins.txt (hashes), sbom.cdx.json,
    provenance.json and container.args; all of them or, after a failure, none."""
    with answering("build", as_json) as answer:
        shipped: list[ship.ReleaseArtifacts] = []
        with showing_progress() as progress, using_cache() as cache:
            project = Project.find()
            pinned = releases.load(project)
            if (release is None) is not all_:
                raise UsageError(
                    "name one RELEASE, or say --all", hint="xpustack build --help"
                )
            for chosen in list(pinned) if release is None else [pinned[release]]:
                try:
                    shipped.append(
                        ship.ship(
                            project,
                            cache,
                            chosen,
                            to,
                            offline=offline,
                            progress=progress,
                        )
                    )
                except StackError as problem:
                    answer.fail(problem)
        answer.data = {"built": [_plain(done) for done in shipped]}
        for done in shipped:
            answer.say(f"{done.release}: vllm {done.version} in {done.directory}")
            answer.say(*(f"{digest}  {name}" for name, digest in done.files.items()))


def _plain(done: ship.ReleaseArtifacts) -> dict[str, Any]:
    return {
        "release": done.release,
        "version": done.version,
        "directory": str(done.directory),
        "wheel": done.wheel,
        "files": dict(done.files),
        "seconds": round(done.seconds, 1),
    }
