# SPDX-License-Identifier: Apache-2.0
"""Runs the tool, or a piece of it, in a process of its own that can be killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOL = (
    sys.executable,
    "-c",
    "from xpustack import __main__; from stack.steptest import server;"
    " server.PRELOADED = ('pytest',); __main__.main()",
)
"""The command line, with a test server that imports nothing large in advance: the
tests of small stacks need none of it."""
_PRELUDE = f"""
import sys, time
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from sdists import pinned
from stack.core.cache import Cache
from stack.core.errors import StackError
def say(message): print(message, flush=True)
"""


def start(
    code: str, *arguments: object, limit: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    """Start `code` with `sys.argv[1:] = arguments`; `limit` runs in the child
    before it."""
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,
    )


def start_tool(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str], signal_: int
) -> subprocess.Popen[str]:
    """Start `xpustack` with `words` and the default action for a signal.

    CI may run as a shell's background job, whose children ignore SIGINT.
    """
    return subprocess.Popen(
        [*TOOL, *words],
        cwd=cwd,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal_, signal.SIG_DFL),
    )


def read_until(child: subprocess.Popen[str], word: str) -> None:
    """Read the child's output up to a line that has `word`."""
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        if word in line:
            return
    raise AssertionError(f"no {word!r} in:\n{''.join(seen)}")


def killed(child: subprocess.Popen[str]) -> None:
    """Kill the child as `kill -9` does and wait for its end."""
    child.kill()
    child.communicate()


def ended(process: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True


def ends(process: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within `seconds`: one that was killed takes some time to,
    where other processes have the processor."""
    deadline = time.monotonic() + seconds
    while not ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended(process)
