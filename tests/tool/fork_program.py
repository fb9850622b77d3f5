# SPDX-License-Identifier: Apache-2.0
"""The process that forks runs of the tool; `forks.Forks` starts it and talks to it.

It imports the tool once, so a run starts in milliseconds. Each line of its input is a
request. It answers with the process id of the fork, then with its exit status, which
is negative where a signal ended it.
"""

import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xpustack import cli
from xpustack.core import cache, fingerprint
from xpustack.core.process import Completed, Runner
from xpustack.steptest import server

CHANGED_PATH = {
    "os.chmod": 0,
    "os.link": 1,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.rename": 1,
    "os.rmdir": 0,
    "os.symlink": 1,
    "os.utime": 0,
}
"""Audit events of Python that announce a change of a file: the position of its path
among the event's arguments. The last argument is the descriptor of its folder."""
WRITABLE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
HASH = re.compile(r"[0-9a-f]{16,}")
SHARD = re.compile(r"(/files|/results)/\w\w(?=/|$)")


class Changes:
    """Names each change of a file below `root` before it happens, such as `rename
    cache/builds/*`; hashes, and all that lies in a temporary folder, are left out.

    The names go to the open file `log`. At the first change named `die_at` the process
    dies: by SIGKILL before the change, or, where a file is opened, by SIGXFSZ when one
    byte of it is written.
    """

    def __init__(self, root: Path, log: int, die_at: str | None) -> None:
        self._root, self._log, self._die_at = root, log, die_at
        self._dying = False
        if die_at is not None:
            # Python ignores this signal, and the tool would clean up after an error.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def watch(self) -> None:
        """Watch this process until its end."""
        exchange = cache.exchange

        def announced(new: Path, target: Path) -> bool:
            # The system call behind it is not audited.
            sys.audit("os.rename", new, target, -1, -1)
            return exchange(new, target)

        cache.exchange = announced
        sys.addaudithook(self._notice)

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        name = self._name(event, arguments)
        if self._dying and (name is not None or event == "subprocess.Popen"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name is None:
            return
        os.write(self._log, f"{name}\n".encode())
        if name == self._die_at:
            self._dying = True
            if event != "open":
                os.kill(os.getpid(), signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))

    def _name(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        folder = -1
        if event == "open":
            path, _, flags = arguments
            if not flags & WRITABLE:
                return None
        elif event in CHANGED_PATH:
            path, folder = arguments[CHANGED_PATH[event]], arguments[-1]
        else:
            return None
        if isinstance(path, int):
            return None
        place = Path(os.fsdecode(path))
        if folder != -1:
            place = Path(os.readlink(f"/proc/self/fd/{folder}")) / place
        if not place.is_absolute() or not place.is_relative_to(self._root):
            return None
        parts = place.relative_to(self._root).parts
        if parts[:1] not in (("cache",), ("project",)):
            return None
        hidden = (index for index, part in enumerate(parts) if part.startswith("."))
        visible = "/".join(parts[: next(hidden, len(parts)) + 1])
        path = SHARD.sub(r"\1/??", HASH.sub("*", visible))
        return f"{event.removeprefix('os.')} {path}"


def reuse_wheels(folder: Path) -> None:
    """Let pip build each version's wheel once, and keep it in `folder`."""
    run = Runner.run

    def run_or_copy(
        runner: Runner, command: Sequence[str], *, env: Mapping[str, str], **rest: Any
    ) -> Completed:
        if "--wheel-dir" not in command:
            return run(runner, command, env=env, **rest)
        target = Path(command[command.index("--wheel-dir") + 1])
        kept = folder / env["VLLM_VERSION_OVERRIDE"]
        if not kept.is_dir():
            completed = run(runner, command, env=env, **rest)
            shutil.copytree(target, kept)
            return completed
        shutil.copytree(kept, target)
        return Completed(0, "", "", 0.0)

    Runner.run = run_or_copy


def run_tool(request: dict[str, Any]) -> None:
    """Be the tool, as the request says, until its end."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    folder = Path(request["output"])
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_TRUNC
        path = os.devnull if name == "stdin" else folder / name
        opened = os.open(path, flags | os.O_CREAT, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    log = os.open(folder / "changes", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    if request["wheels"] is not None:
        reuse_wheels(Path(request["wheels"]))
    Changes(Path(request["root"]), log, request["die_at"]).watch()
    sys.argv = ["xpustack", *request["words"]]
    cli.main()


def main() -> None:
    # What every run would do again.
    server.PRELOADED = ("pytest",)
    fingerprint.lock()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_tool(json.loads(line))
            return
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
