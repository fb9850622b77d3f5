# SPDX-License-Identifier: Apache-2.0
"""Work in processes of their own, and whose fault it is if it ends in an error.

The release refuses a start where its own code raises; so may what reads its
configuration. Everything else, such as an op that knows no tensors without values, is a
fault of the planner: a device would have gone on.
"""

import ast
import itertools
import os
import pickle
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import shapes
from pydantic import ValidationError

REFUSING = ("vllm", "transformers", "huggingface_hub")
"""Packages whose own errors a start on a device would end with."""


class Refused(Exception):
    """The release does not start; the message is its own."""


class Fault(Exception):
    """The planner failed; the message is the traceback."""


def forked(works: Sequence[Callable[[], Any]], at_once: int = 1) -> list[Any]:
    """What `works` return, each in a process of its own, so many at a time.

    Raises:
        Refused, Fault: one of them did not end well; the first one's.
    """
    running: deque[tuple[int, IO[bytes]]] = deque()
    answers: list[tuple[type[Exception] | None, Any]] = []
    for work in works:
        if len(running) == at_once:
            answers.append(_answer(*running.popleft()))
        running.append(_start(work))
    answers += itertools.starmap(_answer, running)
    for kind, said in answers:
        if kind is not None:
            raise kind(said)
    return [result for _, result in answers]


def _start(work: Callable[[], Any]) -> tuple[int, IO[bytes]]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the answer is read later)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        found: tuple[type[Exception] | None, Any]
        try:
            found = (None, work())
        except BaseException as error:
            found = judged(error)
        try:
            pickle.dump(found, file)
            file.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    return child, file


def _answer(child: int, file: IO[bytes]) -> tuple[type[Exception] | None, Any]:
    _, status = os.waitpid(child, 0)
    with file:
        file.seek(0)
        try:
            answer: tuple[type[Exception] | None, Any] = pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            return Fault, f"a process ended with status {status} and no answer"
    return answer


def judged(error: BaseException) -> tuple[type[Exception], str]:
    """Whether the release refuses, or the planner is at fault; and what to say."""
    if isinstance(error, ValidationError):
        said = (str(one["msg"]) for one in error.errors())
        return Refused, "; ".join(text.removeprefix("Value error, ") for text in said)
    if isinstance(error, Refused | Fault):
        return type(error), str(error)
    if isinstance(error, shapes.Incomplete):
        return Refused, str(error)
    if _raised_on_purpose(error):
        return Refused, str(error) or type(error).__name__
    return Fault, "".join(traceback.format_exception(error))


def _raised_on_purpose(error: BaseException) -> bool:
    """Whether a statement of the release's own raised the error."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line
    if place is None:
        return False
    module, file, line = place
    return module.partition(".")[0] in REFUSING and any(
        first <= line <= last for first, last in _raising(file)
    )


@cache
def _raising(file: str) -> tuple[tuple[int, int], ...]:
    """The first and last lines of the statements of a file that raise."""
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(Path(file).read_bytes()))
        if isinstance(node, ast.Raise | ast.Assert)
    )
