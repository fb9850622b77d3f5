# SPDX-License-Identifier: Apache-2.0
"""`xpustack build`: a release's wheel and what lies beside it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from xpustack import releases, ship
from xpustack.cache import Cache
from xpustack.console import (
    AsJson,
    Offline,
    reporting_errors,
    say_all,
    showing_progress,
)
from xpustack.errors import StackError, UsageError
from xpustack.project import Project


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
    made: list[ship.Shipped] = []
    problems: list[StackError] = []
    with reporting_errors(as_json), showing_progress() as progress:
        project = Project.find()
        pinned = releases.load(project)
        if (release is None) is not all_:
            raise UsageError(
                "name one RELEASE, or say --all", hint="xpustack build --help"
            )
        for one in list(pinned) if release is None else [pinned[release]]:
            try:
                made.append(
                    ship.ship(
                        project,
                        Cache.default(),
                        one,
                        to,
                        offline=offline,
                        progress=progress,
                    )
                )
            except StackError as problem:
                problems.append(problem)
    data = {
        "built": [_plain(one) for one in made],
        "errors": [problem.to_json() for problem in problems],
    }
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        for done in made:
            print(f"{done.release}: vllm {done.version} in {done.directory}")
            lines = (f"{digest}  {name}" for name, digest in done.files.items())
            print("\n".join(lines))
    if problems:
        if not as_json:
            say_all(problems)
        raise typer.Exit(problems[0].exit_code)


def _plain(one: ship.Shipped) -> dict[str, Any]:
    return {
        "release": one.release,
        "version": one.version,
        "directory": str(one.directory),
        "wheel": one.wheel,
        "files": dict(one.files),
        "seconds": round(one.seconds, 1),
    }
