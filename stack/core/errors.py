# SPDX-License-Identifier: Apache-2.0
"""Every failure that a user can meet: what, where, and the next command to run.

Exit codes: 0 success, 1 a check failed, 2 wrong usage, 3 a release or its
archive, 4 a series or a patch that does not apply, 5 the machine (a missing
tool, a full disk, a damaged cache), 70 a fault of the tool itself, 130 interrupted.
"""

import contextlib
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar

Again = Callable[[Sequence[str]], str | None]
"""Makes the next command of the words of the one that failed; None if it cannot."""


class StackError(Exception):
    """An error that a user sees: a message, its place, and the next command to run.

    Args:
        message: one sentence, without a final full stop.
        release: name of the release concerned, such as `v0.22.1`.
        step: slug of the step concerned.
        path: the file that a person must look at, `file:line` where known.
        detail: further lines, such as both sides of a mismatch.
        hint: the next command to run.
        again: makes the hint where the user's own words are known.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        release: str | None = None,
        step: str | None = None,
        path: str | PurePath | None = None,
        detail: str | Iterable[str] | None = None,
        hint: str | None = None,
        again: Again | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.release = release
        self.step = step
        self.path = None if path is None else str(path)
        if isinstance(detail, str):
            detail = detail.splitlines()
        self.detail = tuple(detail or ())
        self.hint = hint or (again(()) if again else None)
        self.again = again

    def __str__(self) -> str:
        lines = [self.message]
        places = (("release", self.release), ("step", self.step), ("file", self.path))
        lines += [f"  {word}: {value}" for word, value in places if value]
        lines += [f"  {line}".rstrip() for line in self.detail]
        if self.hint:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The same as plain data: `error` is the class name, absent parts are
        None, `detail` is a list of lines."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "release": self.release,
            "step": self.step,
            "file": self.path,
            "detail": list(self.detail),
            "next": self.hint,
        }


def error_from_json(data: Mapping[str, Any]) -> StackError:
    """The error that another run of the tool gave as `StackError.to_json`."""
    kinds = (CheckFailed, UsageError, SourceError, SeriesError, EnvironmentProblem)
    kind = {kind.exit_code: kind for kind in kinds}.get(data["exit_code"], StackError)
    return kind(
        data["message"],
        release=data["release"],
        step=data["step"],
        path=data["file"],
        detail=data["detail"],
        hint=data["next"],
    )


def command(*words: object) -> str:
    """The words as one command line, quoted for a shell: for hints."""
    return shlex.join(map(str, words))


def meant(said: str, name: str) -> Again:
    """The user's command with the name that is meant in place of the one said."""

    def again(words: Sequence[str]) -> str | None:
        if list(words).count(said) != 1:
            return None
        return command("xpustack", *(name if w == said else w for w in words))

    return again


@contextlib.contextmanager
def elsewhere(place: Path) -> Iterator[None]:
    """Let errors about writing to `place` suggest another one by `--to`."""

    def again(words: Sequence[str]) -> str:
        given = list(words)
        while "--to" in given:
            del given[(at := given.index("--to")) : at + 2]
        given = [word for word in given if not word.startswith("--to=")]
        return command("xpustack", *given, "--to", "DIR")

    try:
        yield
    except EnvironmentProblem as error:
        target, path = place.absolute(), Path(error.path or "")
        # A file above it may be in the way.
        if error.path and (path.is_relative_to(target) or path in target.parents):
            error.again = again
        raise


def in_tox(words: Sequence[str]) -> str:
    """The user's command in an environment that has every package."""
    if words[:1] == ["-C"]:
        return f"{command('cd', words[1])} && {in_tox(words[2:])}"
    if words and (own := _TOX.get(words[0])):
        return command("tox", "-e", own, "--", *words[1:])
    return command("bin/xpustack", *words)


@contextlib.contextmanager
def concerning(release: str | None = None, step: str | None = None) -> Iterator[None]:
    """Add the release and the step to errors of the block that do not name them,
    because they come from code that does not know them."""
    try:
        yield
    except StackError as error:
        error.release = error.release or release
        error.step = error.step or step
        raise


@contextlib.contextmanager
def relocated(scratch: Path, place: Path) -> Iterator[None]:
    """Replace `scratch` by `place` in the paths that errors of the block name: the
    files below `scratch` no longer exist when a person reads the error."""

    def relocate(text: str) -> str:
        return text.replace(str(scratch), str(place))

    try:
        yield
    except StackError as error:
        error.message = relocate(error.message)
        error.path = relocate(error.path) if error.path else None
        error.detail = tuple(map(relocate, error.detail))
        error.hint = relocate(error.hint) if error.hint else None
        raise


_TOX = {"build": "build", "check": "apply-and-test", "export": "export"}
"""Commands that an environment of tox runs with whatever follows `--`."""


class CheckFailed(StackError):
    """A build, lint or test of a tree failed."""

    exit_code = 1


class UsageError(StackError):
    """The caller named something that does not exist or cannot be asked for."""

    exit_code = 2


class SourceError(StackError):
    """A pin, a download or an archive is wrong or missing."""

    exit_code = 3


class SeriesError(StackError):
    """A series, a patch, a trailer or an overlay file is malformed."""

    exit_code = 4


class ApplyError(SeriesError):
    """A well-formed step does not fit the tree it is applied to."""


class EnvironmentProblem(StackError):
    """The machine lacks something: a tool, a permission, disk space."""

    exit_code = 5


class Interrupted(StackError):
    """A person or the system ended the command."""

    exit_code = 130


class InternalError(StackError):
    """The tool itself is at fault; `detail` is the traceback."""

    exit_code = 70


_HOME = Path(__file__).parents[2]


def stack_error_of(error: Exception) -> StackError:
    """The error to report for an exception: itself if it is one of ours; an `OSError`
    is a problem of the machine, and everything else is a fault of the tool itself."""
    if isinstance(error, StackError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    # Not Python's own, which says nothing about what was asked for.
    own = [f for f in frames if Path(f.filename).is_relative_to(_HOME)] or frames
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    if isinstance(error, OSError):
        path = error.filename if isinstance(error.filename, str | PurePath) else None
        return EnvironmentProblem(
            f"the operating system refuses: {error.strerror or error}",
            path=path,
            detail=[f"asked at {place}"],
            hint=f"ls -ld {shlex.quote(str(path))}" if path else "df -h; ulimit -a",
        )
    return InternalError(
        f"internal error: {type(error).__name__}: {error}",
        detail="".join(traceback.format_exception(error)),
        hint="this is a fault of xpustack, not of your files: report the lines above",
    )
