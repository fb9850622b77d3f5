# SPDX-License-Identifier: Apache-2.0
"""A run's processes end with the run, even one that was killed by `kill -9`.

A family is the set of processes that were started with the family's name in the
environment variable `FAMILY`. Children inherit it, also in a new session. The
warden is this file, run as a separate process with the family's name. It waits
for the end of its standard input, whose other end only the tool holds, and then
kills the processes that are left. It imports only the standard library.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

FAMILY = "XPUSTACK_FAMILY"
PATIENCE = 10.0


def kill_family(name: str) -> None:
    """Kill every process of the family and of the families inside it, until none is
    left. After `PATIENCE` s it gives up on processes that do not end."""
    limit = time.monotonic() + PATIENCE
    while members := list(_members(name)):
        for process in members:
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if time.monotonic() > limit:
            return
        time.sleep(0.01)


def _members(name: str) -> Iterator[int]:
    """The living processes of a family, except this one."""
    mark = f"{FAMILY}={name}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if any(f == mark or f.startswith(mark + b"/") for f in variables):
            yield int(entry)


def main() -> None:
    """Wait for the end of the tool, then kill its family."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    kill_family(sys.argv[1])


if __name__ == "__main__":
    main()
