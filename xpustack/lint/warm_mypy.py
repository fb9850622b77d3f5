# SPDX-License-Identifier: Apache-2.0
"""The tool's side of the mypy that stays between two lints of a release."""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from xpustack.core.cache import Cache
from xpustack.core.process import Completed, Runner, Stopped, program
from xpustack.lint.mypy_sites import Sites

SERVER = Path(__file__).with_name("mypy_program.py")
"""Not imported: the tool itself does not need mypy."""
CONFIGURATION = frozenset({"mypy.ini", ".mypy.ini", "pyproject.toml", "setup.cfg"})
"""Files in which mypy looks for its options."""


class _Answer(msgspec.Struct):
    messages: list[str] = []
    refused: str | None = None


class WarmMypy:
    """One mypy for each set of flags that a release's script uses.

    Args:
        folder: the checked-out tree, which moves from one tree to another.
        work: where it may write.
        env: the environment of mypy, without a cache folder.
    """

    def __init__(
        self,
        runner: Runner,
        cache: Cache,
        folder: Path,
        work: Path,
        env: Mapping[str, str],
        limit: float,
    ) -> None:
        self._runner, self._cache, self._folder = runner, cache, folder
        self._work, self._env, self._limit = work, env, limit
        self._processes: dict[tuple[str, ...], _Process] = {}
        self._memories: dict[tuple[str, ...], Path] = {}
        self._count = 0
        self.later: frozenset[str] = frozenset()
        """What is to be asked about before long; if that is nothing, starting a
        process would not pay."""
        self.notes: list[str] = []

    def close(self) -> None:
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def moved(self, touched: Collection[str]) -> None:
        """Take note of files that were written or removed."""
        if not CONFIGURATION.isdisjoint(touched):
            self.close()
        for process in self._processes.values():
            process.touched.update(touched)

    def check(self, flags: Sequence[str], files: Sequence[str]) -> Completed:
        """Run `mypy FLAGS FILES`: what the process that stays says of the files, or
        else a new one.

        The first of all is a new one: it leaves what it learned of the installed
        packages, without which the process that stays needs a minute and gigabytes
        more. A process that dies is started again once; `notes` say so.

        Raises:
            Stopped: the runner was stopped.
        """
        key = tuple(flags)
        sites = Sites(self._cache, key)
        unknown = not sites.path.is_file()
        if key not in self._processes and (unknown or not self.later):
            done = self._anew(key, files)
            if unknown:
                memory = self._memories[key] / _target(key)
                sites.keep(memory / "cache.db", self._own())
            return done
        begin = time.monotonic()
        messages = self._told(key, files)
        if messages is None:
            return self._anew(key, files)
        output = "".join(f"{line}\n" for line in messages)
        return Completed(int(bool(messages)), output, "", time.monotonic() - begin)

    def _likely(self, files: Sequence[str]) -> list[str]:
        """Other files of the same folders that are to be asked about: a process that
        starts reads them with what they import, which is quicker than one by one."""
        tops = {path.partition("/")[0] for path in files}
        return sorted(
            path
            for path in self.later.difference(files)
            if path.partition("/")[0] in tops
            and path.endswith(".py")
            and (self._folder / path).is_file()
        )

    def _own(self) -> set[str]:
        """The names of the modules at the top of the tree."""
        return {path.name.partition(".")[0] for path in self._folder.iterdir()}

    def _told(self, flags: tuple[str, ...], files: Sequence[str]) -> list[str] | None:
        """The messages by the process that stays; None where only a new one can
        tell."""
        for _ in range(2):
            process = self._processes.get(flags)
            if process is None:
                memory = self._memory(flags)
                process = _Process(self._runner, flags, self._folder, memory, self._env)
                self._processes[flags] = process
            answer = process.ask(files, self._likely(files), self._limit)
            if self._runner.stopped:
                raise Stopped
            if answer is not None and answer.refused is None:
                return answer.messages
            process.end()
            del self._processes[flags]
            if answer is not None:
                return None
            self.notes.append(f"mypy's server ended: {process.printed()}")
        return None

    def _anew(self, flags: tuple[str, ...], files: Sequence[str]) -> Completed:
        if flags not in self._memories:
            self._memories[flags] = self._memory(flags)
        return self._runner.run(
            [*program("mypy"), *flags, *files],
            cwd=self._folder,
            env={**self._env, "MYPY_CACHE_DIR": str(self._memories[flags])},
            timeout=self._limit,
        )

    def _memory(self, flags: tuple[str, ...]) -> Path:
        """A new cache folder for mypy, with what is known of installed packages."""
        self._count += 1
        folder = self._work / f"mypy-{self._count}"
        folder.mkdir(parents=True)
        Sites(self._cache, flags).copy_to(folder / _target(flags) / "cache.db")
        return folder


def _target(flags: Sequence[str]) -> str:
    """The version of Python that mypy checks for, by which it names its cache."""
    for flag, value in itertools.pairwise(flags):
        if flag == "--python-version":
            return value
    return f"{sys.version_info.major}.{sys.version_info.minor}"


class _Process:
    """The server's process, and the files that changed since it last looked."""

    def __init__(
        self,
        runner: Runner,
        flags: tuple[str, ...],
        folder: Path,
        memory: Path,
        env: Mapping[str, str],
    ) -> None:
        self.touched: set[str] = set()
        self._flags = flags
        self._log = memory / "server.log"
        with self._log.open("wb") as log:
            self._child = runner.start(
                # -P: the tool's own modules are not among those that mypy may find.
                [sys.executable, "-P", str(SERVER)],
                cwd=folder,
                env={**env, "MYPY_CACHE_DIR": str(memory)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def ask(
        self, files: Sequence[str], likely: Sequence[str], limit: float
    ) -> _Answer | None:
        """The answer about `files`; None if the process ended, or was ended after
        `limit` s. The first time it reads those that are `likely` as well."""
        assert self._child.stdin is not None and self._child.stdout is not None
        request = {
            "arguments": [*self._flags, *files, *likely],
            "files": list(files),
            "touched": sorted(self.touched),
        }
        timer = threading.Timer(limit, self._child.kill)
        timer.start()
        try:
            self._child.stdin.write(msgspec.json.encode(request).decode() + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            return None
        self.touched.clear()
        return msgspec.json.decode(line, type=_Answer)

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def printed(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return "; ".join(lines[-3:])
