# SPDX-License-Identifier: Apache-2.0
"""Commands of `vllm serve`, configured by a patched release on the emulated XPU."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from proof.e2e.running.server import server_environment
from proof.e2e.running.serving import Engines
from stack.core.process import Runner

LIMIT = 600.0


def ends(
    engines: Engines,
    release: str,
    work: Path,
    commands: Mapping[str, Sequence[str]],
    **more: str,
) -> dict[str, str]:
    """How each ends before a worker starts: "" or the message.

    Args:
        work: an empty folder.
        commands: by name, the arguments behind `vllm serve`; the model is a folder.
        more: variables besides a server's.

    Raises:
        RuntimeError: none could be configured; the message is the end of the output.
    """
    job, answer = work / "job.json", work / "answer.json"
    job.write_text(json.dumps(commands))
    with Runner().stop_on_error() as runner:
        done = runner.run(
            [sys.executable, "-m", "proof.e2e.inside.configure", str(job), str(answer)],
            cwd=work,
            env=server_environment(engines, release) | more,
            timeout=LIMIT,
        )
    if done.returncode or not answer.is_file():
        raise RuntimeError("\n".join(done.last_lines()))
    found: dict[str, str] = json.loads(answer.read_text())
    return found
