# SPDX-License-Identifier: Apache-2.0
"""A run's processes end with the run, even one that was killed by `kill -9`.

A family is every process whose environment, when it was started, named it in
`FAMILY`: children hand it to their children, whatever session they begin. The
warden is this file as a process of its own, run with the family's name. It waits
for the end of its standard input, whose other end only the tool holds, and kills
who is left. It imports the standard library alone.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

FAMILY = "XPUSTACK_FAMILY"
PATIENCE = 10.0


def kill_family(name: str) -> None:
    """Kill every process of the family, and of those that it holds, until none is
    left. One that the system does not let go within `PATIENCE` s is left alone."""
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
    """The living processes of a family, but for this one."""
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
    """Wait for the end of the tool, then for that of its family."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    kill_family(sys.argv[1])


if __name__ == "__main__":
    main()
