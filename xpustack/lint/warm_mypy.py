# SPDX-License-Identifier: Apache-2.0
"""The tool's side of the mypy server that keeps running between a release's lints."""

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
from xpustack.lint.site_packages_cache import SitePackagesCache

SERVER = Path(__file__).with_name("mypy_program.py")
"""A path, not an import: the tool itself does not need mypy."""
OPTION_FILES = frozenset({"mypy.ini", ".mypy.ini", "pyproject.toml", "setup.cfg"})
"""Files in which mypy looks for its options."""


class _MypyAnswer(msgspec.Struct):
    messages: list[str] = []
    refused: str | None = None


class WarmMypy:
    """One mypy server for each set of flags that a release's script uses.

    Args:
        folder: the checked-out tree, which moves from one tree to another.
        work: a folder to write in.
        limit: seconds that one check may take.
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
        self._servers: dict[tuple[str, ...], _MypyServer] = {}
        self._cache_folders: dict[tuple[str, ...], Path] = {}
        self._count = 0
        self.later: frozenset[str] = frozenset()
        """Files that later calls may check. If there are none, starting a server does
        not pay."""
        self.notes: list[str] = []

    def close(self) -> None:
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    def moved(self, touched: Collection[str]) -> None:
        """Tell the servers about files that were written or removed."""
        if not OPTION_FILES.isdisjoint(touched):
            self.close()
        for server in self._servers.values():
            server.touched.update(touched)

    def check(self, flags: Sequence[str], files: Sequence[str]) -> Completed:
        """Run `mypy FLAGS FILES` in a server, or else in a new process.

        The very first call uses a new process, which leaves its cache of the installed
        packages: without that, a server needs a minute and gigabytes more. A server
        that dies is started again once, and `notes` say so.

        Raises:
            Stopped: the runner was stopped.
        """
        key = tuple(flags)
        installed = SitePackagesCache(self._cache, key)
        uncached = not installed.path.is_file()
        if key not in self._servers and (uncached or not self.later):
            result = self._run_new(key, files)
            if uncached:
                folder = self._cache_folders[key] / _target(key)
                installed.keep(folder / "cache.db", self._own_modules())
            return result
        begin = time.monotonic()
        messages = self._ask_server(key, files)
        if messages is None:
            return self._run_new(key, files)
        output = "".join(f"{line}\n" for line in messages)
        return Completed(int(bool(messages)), output, "", time.monotonic() - begin)

    def _likely(self, files: Sequence[str]) -> list[str]:
        """Files of the same top folders that later calls may check. A server that
        starts reads them all at once, which is quicker than one by one."""
        tops = {path.partition("/")[0] for path in files}
        return sorted(
            path
            for path in self.later.difference(files)
            if path.partition("/")[0] in tops
            and path.endswith(".py")
            and (self._folder / path).is_file()
        )

    def _own_modules(self) -> set[str]:
        """The names of the modules at the top of the tree."""
        return {path.name.partition(".")[0] for path in self._folder.iterdir()}

    def _ask_server(
        self, flags: tuple[str, ...], files: Sequence[str]
    ) -> list[str] | None:
        """The server's messages; None where only a new process can answer."""
        for _ in range(2):
            server = self._servers.get(flags)
            if server is None:
                cache = self._new_cache_folder(flags)
                server = _MypyServer(
                    self._runner, flags, self._folder, cache, self._env
                )
                self._servers[flags] = server
            answer = server.ask(files, self._likely(files), self._limit)
            if self._runner.stopped:
                raise Stopped
            if answer is not None and answer.refused is None:
                return answer.messages
            server.end()
            del self._servers[flags]
            if answer is not None:
                return None
            self.notes.append(f"mypy's server ended: {server.printed()}")
        return None

    def _run_new(self, flags: tuple[str, ...], files: Sequence[str]) -> Completed:
        if flags not in self._cache_folders:
            self._cache_folders[flags] = self._new_cache_folder(flags)
        return self._runner.run(
            [*program("mypy"), *flags, *files],
            cwd=self._folder,
            env={**self._env, "MYPY_CACHE_DIR": str(self._cache_folders[flags])},
            timeout=self._limit,
        )

    def _new_cache_folder(self, flags: tuple[str, ...]) -> Path:
        """A new cache folder for mypy, with the cache of the installed packages."""
        self._count += 1
        folder = self._work / f"mypy-{self._count}"
        folder.mkdir(parents=True)
        database = folder / _target(flags) / "cache.db"
        SitePackagesCache(self._cache, flags).copy_to(database)
        return folder


def _target(flags: Sequence[str]) -> str:
    """The version of Python that mypy checks for, by which it names its cache."""
    for flag, value in itertools.pairwise(flags):
        if flag == "--python-version":
            return value
    return f"{sys.version_info.major}.{sys.version_info.minor}"


class _MypyServer:
    """A server process, and the files that changed since its last answer."""

    def __init__(
        self,
        runner: Runner,
        flags: tuple[str, ...],
        folder: Path,
        cache_folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self.touched: set[str] = set()
        self._flags = flags
        self._log = cache_folder / "server.log"
        with self._log.open("wb") as log:
            self._child = runner.start(
                # -P: mypy must not find the tool's own modules.
                [sys.executable, "-P", str(SERVER)],
                cwd=folder,
                env={**env, "MYPY_CACHE_DIR": str(cache_folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def ask(
        self, files: Sequence[str], likely: Sequence[str], limit: float
    ) -> _MypyAnswer | None:
        """The answer about `files`; None if the server ended, or was killed after
        `limit` seconds. For its first answer it also reads the `likely` files."""
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
        return msgspec.json.decode(line, type=_MypyAnswer)

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
