# SPDX-License-Identifier: Apache-2.0
"""The content-addressed cache that all runs share, concurrent ones included.

An entry under its final name is complete: it was written in, or as, a temporary folder
beside it and then renamed. The writer holds a lock on that folder. The kernel drops the
lock when the writer dies, so the next writer can tell a leftover from work in progress,
and removes it.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from stack.core.errors import EnvironmentProblem, UsageError, command
from stack.core.files import file_above
from stack.core.progress import Progress, silent

MEMORY = Path("/dev/shm")
MEMORY_FREE = 4 << 30
"""Bytes that must be free there and in memory for what exists for seconds."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_TEMPORARY = re.compile(r"\.xpustack-[0-9a-f]{16}\.part")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Cache:
    """A cache rooted at a directory, which need not exist yet. One object serves one
    run.

    Attributes:
        offline: whether what it lacks may not be downloaded.
        progress: receives a message before what takes long, and when another run must
            be waited for.
    """

    root: Path
    offline: bool = False
    progress: Progress = field(default=silent, compare=False)

    @classmethod
    def default(cls, offline: bool = False, progress: Progress = silent) -> "Cache":
        """`$XPUSTACK_CACHE`, else `xpustack` in the XDG cache directory."""
        folder = os.environ.get("XPUSTACK_CACHE")
        root = Path(folder).expanduser() if folder else user_cache_path("xpustack")
        return cls(root.absolute(), offline, progress)

    @property
    def sdists(self) -> Path:
        """Verified archives, as `<sha256>/<file>`."""
        return self.root / "sdists"

    @property
    def objects(self) -> Path:
        """The bare git store that holds every base and tree."""
        return self.root / "objects"

    @property
    def builds(self) -> Path:
        """Installed trees, as `<key>/site` with the manifest beside it."""
        return self.root / "builds"

    @functools.cached_property
    def digests(self) -> dict[tuple[int, int, int], str]:
        """The sha256 of the installed files that this run read, by device, inode and
        time: one with many names is read once, and a change later in the run that
        keeps the time goes unnoticed."""
        return {}

    @property
    def results(self) -> Path:
        return self.root / "results"

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock `name` against every other thread and process. Not
        re-entrant."""
        path = self.root / "locks" / f"{_checked(name)}.lock"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file_lock = FileLock(path)
            try:
                file_lock.acquire(timeout=0)
            except Timeout:
                self.progress(f"waiting for another run to release {name}")
                file_lock.acquire()
        try:
            yield
        finally:
            file_lock.release()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let nobody be `alone` with the cache during the block."""
        with contextlib.ExitStack() as stack:
            # A cache that cannot be opened fails when it is written, and says more.
            with contextlib.suppress(OSError):
                self.root.mkdir(parents=True, exist_ok=True)
                handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody else use the cache during the block.

        Raises:
            EnvironmentProblem: another run uses it.
        """
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise EnvironmentProblem(
                "another run uses the cache",
                path=self.root,
                hint="the same command again when that run has ended",
            ) from None
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def scratch(self, *, in_memory: bool = False) -> Iterator[Path]:
        """A directory on the cache's own disk, removed after the block.

        If the run is killed, the next run removes it.

        Args:
            in_memory: let it be there if the machine has room, as for a whole tree:
                writing and removing its files takes longer than filling them. Nothing
                can be renamed into the cache then.

        Raises:
            EnvironmentProblem: the disk is full, or writing there is denied.
        """
        parent = self.root / "scratch"
        if in_memory:
            parent = _folder_in_memory() or parent
        with writing(parent), _new_dir(parent) as directory:
            yield directory

    def sweep(self) -> list[Path]:
        """Remove the leftovers of killed runs in the whole cache; return their paths.

        Raises:
            EnvironmentProblem: removing it is denied.
        """
        removed = []
        with writing(self.root):
            for folder in (self.root, *self.root.glob("*/"), *self.root.glob("*/*/")):
                # Git's own folders hold no temporary entries.
                if not folder.is_relative_to(self.objects) and folder.is_dir():
                    removed += sweep(folder)
            if (memory := _folder_in_memory()) is not None:
                removed += sweep(memory)
        return removed

    def results_get(self, key: str) -> dict[str, Any] | None:
        """The result stored under `key`; None if there is none or it is damaged."""
        path = self._result(key)
        try:
            value = json.loads(path.read_bytes())
            count_as_used(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def results_put(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a JSON-able mapping; the last writer of a key wins."""
        with atomic_file(self._result(key)) as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")

    def _result(self, key: str) -> Path:
        return self.results / _checked(key)[:2] / f"{key}.json"


def count_as_used(path: Path) -> None:
    """Keep an entry from the next clean-up, which keeps what was used last."""
    with contextlib.suppress(OSError):
        os.utime(path)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """A new file, renamed to `target` and synced when the block ends well.

    An existing `target` is replaced. After an exception nothing is left.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    with writing(target), _new_dir(target.parent) as folder:
        with open(folder / target.name, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / target.name, target)
        _sync(target.parent)


@contextlib.contextmanager
def atomic_dir(target: Path) -> Iterator[Path]:
    """A new empty directory, renamed to `target` when the block ends well.

    If `target` exists and is not empty by then, another run was faster and its
    directory stays. The files in it are not synced: a directory in the cache can be
    derived again.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    with writing(target), _new_dir(target.parent) as temporary:
        yield temporary
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(target.parent)


@contextlib.contextmanager
def replace_dir(target: Path) -> Iterator[Path]:
    """A new empty directory that replaces `target` when the block ends well. Until
    then, and after an exception, `target` stays as it was.

    A run that is killed between the two renames leaves no `target`: this is for what
    the same command makes again.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    with writing(target), _new_dir(target.parent) as away, atomic_dir(target) as new:
        yield new
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, away / "old")


def sweep(directory: Path) -> list[Path]:
    """Remove the leftovers of killed writers in `directory`; return their paths.

    Entries that a living writer has locked stay.
    """
    removed = []
    for name in os.listdir(directory):
        if not _TEMPORARY.fullmatch(name):
            continue
        path = directory / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
    return removed


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors on writing at or below `path` into one of ours.

    Raises:
        EnvironmentProblem: the disk or quota is full, access is denied, a file is
            where a folder must be, or the other way round, or no folder can be made.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            message, hint = "the disk is full", command("df", "-h", path.parent)
        elif error.errno in _NOT_ALLOWED:
            message, hint = "not allowed to write", command("ls", "-ld", path.parent)
        elif error.errno == errno.ENOTDIR or (
            error.errno == errno.EEXIST and not path.is_dir()
        ):
            message, path = "a file is where a directory must be", file_above(path)
            hint = command("mv", path) + " NEW_NAME"
        elif isinstance(error, _NotMade):
            message, hint = "no folder can be made there", command("ls", "-ld", path)
        else:
            raise
        detail = [error.strerror or str(error)]
        if path.is_relative_to(Cache.default().root):
            detail.append("XPUSTACK_CACHE=DIR moves the cache to another disk")
        raise EnvironmentProblem(
            message, path=path, detail=detail, hint=hint
        ) from error


class _NotMade(OSError):
    """A folder cannot be made, for a reason that no other error here has, such as a
    place that is no file system, or a name that is too long."""


@contextlib.contextmanager
def _making() -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in _NO_ROOM | _NOT_ALLOWED:
            raise
        raise _NotMade(error.errno, error.strerror, error.filename) from error


@contextlib.contextmanager
def _new_dir(parent: Path) -> Iterator[Path]:
    """A new empty directory in `parent`, locked by this process. After the block,
    whatever has its name is removed.

    A sweeper may remove it before it is opened or locked; then this makes another one.
    """
    with _making():
        parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    while True:
        directory = parent / f".xpustack-{secrets.token_hex(8)}.part"
        with _making():
            directory.mkdir()
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if directory.exists():
                break
            os.close(handle)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(handle)


def _folder_in_memory() -> Path | None:
    """This user's folder for trees that exist for seconds; None if the machine has none
    with room, or if no program may run there."""
    place = MEMORY / f"xpustack-{os.getuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status, system = place.lstat(), os.statvfs(place)
        meminfo = Path("/proc/meminfo").read_text("utf-8")
    except OSError:
        return None
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    memory = re.search(r"MemAvailable: +(\d+) kB", meminfo)
    free = system.f_bavail * system.f_frsize
    if memory is None or min(free, int(memory[1]) << 10) < MEMORY_FREE:
        return None
    return place if own and not system.f_flag & os.ST_NOEXEC else None


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name an entry of the cache")
    return name
