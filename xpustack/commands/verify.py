# SPDX-License-Identifier: Apache-2.0
"""`xpustack verify`: is this wheel what this checkout makes?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from xpustack import verify as judge
from xpustack.cache import Cache
from xpustack.console import AsJson, Offline, reporting_errors, showing_progress
from xpustack.errors import CheckFailed
from xpustack.project import Project


def verify(
    wheel: Annotated[Path, typer.Argument(help="A wheel that xpustack build made.")],
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Build the wheel again and say, file by file, what differs.

    Judged are the wheel's members and its own bytes, the files beside it, and the
    base, patches, overlay and kernels that its provenance names. Exit code 0 means
    that all are the same, 1 that the listed ones differ."""
    with reporting_errors(as_json), showing_progress() as progress:
        verdict = judge.verify(
            Project.find(),
            Cache.default(),
            wheel,
            offline=offline,
            progress=progress,
        )
    if as_json:
        data = {
            "wheel": str(verdict.wheel),
            "release": verdict.release,
            "verified": verdict.good,
            "differences": [
                {"file": one.path, "problem": one.problem, "detail": list(one.detail)}
                for one in verdict.differences
            ],
            "notes": list(verdict.notes),
        }
        print(json.dumps(data, indent=1))
    else:
        lines = [*map(str, verdict.differences)]
        lines += [f"note: {note}" for note in verdict.notes]
        count = len(verdict.differences)
        lines.append(
            f"{wheel.name}: {f'{count} files differ' if count else 'verified'}"
        )
        print("\n".join(lines))
    if not verdict.good:
        raise typer.Exit(CheckFailed.exit_code)
