# SPDX-License-Identifier: Apache-2.0
"""`xpustack verify`: compare a wheel with what this checkout builds."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.core.errors import CheckFailed
from xpustack.core.project import Project
from xpustack.release.verify import verify as verify_wheel
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)


def verify(
    wheel: Annotated[Path, typer.Argument(help="A wheel that xpustack build made.")],
    key: Annotated[
        Path | None,
        typer.Option(help="The signer's public key (PEM)."),
    ] = None,
    repository: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="The repository whose release workflow must have attested the wheel.",
        ),
    ] = None,
    trusted_root: Annotated[
        Path | None,
        typer.Option(
            help="sigstore's roots of trust (JSON).",
            show_default="its public instance's",
        ),
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Build the wheel again and say, file by file, what differs.

    This compares the wheel's members and its own bytes, the files beside it, and
    the base, patches, overlay and kernels that its provenance names. With --key, the
    signature of the provenance must be by that key; with --repository, the
    attestation beside the wheel by that repository's release workflow, and name wheel
    and provenance. A published wheel's vX.Y.Z.tar.gz has all these files. Exit code 0
    means that all are the same, 1 that the listed ones differ."""
    with answering("verify", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            verdict = verify_wheel(
                Project.find(),
                cache,
                wheel,
                public_key=key,
                repository=repository,
                trusted_root=trusted_root,
                offline=offline,
                progress=progress,
            )
        answer.data = {
            "wheel": str(verdict.wheel),
            "release": verdict.release,
            "verified": verdict.good,
            "differences": [
                {
                    "file": difference.path,
                    "problem": difference.problem,
                    "detail": list(difference.detail),
                }
                for difference in verdict.differences
            ],
            "notes": list(verdict.notes),
        }
        answer.say(*map(str, verdict.differences))
        answer.say(*(f"note: {note}" for note in verdict.notes))
        count = len(verdict.differences)
        answer.say(f"{wheel.name}: {f'{count} files differ' if count else 'verified'}")
        if not verdict.good:
            answer.exit_code = CheckFailed.exit_code
