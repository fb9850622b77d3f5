# SPDX-License-Identifier: Apache-2.0
"""The steps of a release: reads and writes their patch files.

A step is a file `patches/<slug>/<release>.patch`, which releases share: `Subject:
[PATCH] ...`, the message, the trailers, a line `---`, and `git diff` without lines of
blob ids, which may be empty. A file must be byte for byte as `format_patch` writes it,
so that the diff of a refresh shows only real changes.
"""

import difflib
import re
from pathlib import Path
from typing import Any

from stack.core.errors import SeriesError
from stack.core.files import read_file
from stack.core.project import Project
from stack.series.diff import DiffError, forbidden, parse_diff, without_ids
from stack.series.order import blaming, read_patches
from stack.series.tree import KERNEL_HOME, KEYS, Step, Trailers

_HEADER = "Subject: [PATCH] "
_NO_MESSAGE = re.compile(r"\A(?i:From|Subject|Date):|^(?:diff -|Index: |--- )", re.M)
"""What git takes for a header of the mail, or for the begin of its diff."""
_TRAILER = re.compile(rf"({'|'.join(KEYS)}):(?: (.*))?")
_STATUS = re.compile(
    r"Pending|(?:Submitted|Backport) \[vllm-project/vllm#[1-9]\d*\]"
    r"|Inappropriate \[\S[^\]]*\]"
)
_RELATED = re.compile(r"vllm-project/[a-z][a-z-]*#[1-9]\d*")
_REPEATABLE = ("Related", "Overlay", "Kernels")
_TEST = re.compile(r"tests/steps/test_[a-z0-9_]+\.py")


def format_patch(step: Step) -> bytes:
    """The content of a step's patch file."""
    return f"{_HEADER}{step.text}---\n".encode() + step.diff


def split_text(text: str) -> tuple[str, str, Trailers]:
    """Subject, message and trailers of a commit message.

    Blanks in the subject become single spaces, as git reads them from a mail.

    Raises:
        ValueError: the last paragraph mixes trailers with other lines, or repeats a
            trailer that may occur only once.
    """
    first, _, rest = text.strip("\n").partition("\n")
    subject = " ".join(first.split())
    paragraphs = rest.strip("\n").split("\n\n") if rest.strip() else []
    last = paragraphs[-1].splitlines() if paragraphs else []
    if not any(_TRAILER.match(line) for line in last):
        return subject, "\n\n".join(paragraphs), Trailers()
    given: dict[str, list[str]] = {}
    for line in last:
        match = _TRAILER.fullmatch(line)
        if match is None:
            raise ValueError(f"not a trailer of a step: {line!r}")
        given.setdefault(match[1], []).append((match[2] or "").strip())
    for key, values in given.items():
        if key not in _REPEATABLE and len(values) > 1:
            raise ValueError(f"the trailer {key} is there twice")
    fields: dict[str, Any] = {
        KEYS[key]: tuple(values) if key in _REPEATABLE else values[0]
        for key, values in given.items()
    }
    return subject, "\n\n".join(paragraphs[:-1]), Trailers(**fields)


def step_problems(step: Step) -> list[str]:
    """What is wrong with a step's trailers, and with what its diff touches; one
    sentence per problem."""
    trailers = step.trailers
    problems = []
    if not trailers.upstream_status:
        problems.append("the trailer Upstream-Status is missing")
    elif not _STATUS.fullmatch(trailers.upstream_status):
        problems.append(
            f"Upstream-Status {trailers.upstream_status!r} is none of: Pending,"
            " Submitted [vllm-project/vllm#N], Backport [vllm-project/vllm#N],"
            " Inappropriate [why]"
        )
    for index, reference in enumerate(trailers.related):
        if not _RELATED.fullmatch(reference):
            problems.append(f"Related {reference!r} is not vllm-project/vllm#N")
        elif reference in trailers.related[:index]:
            problems.append(f"the trailer Related names {reference} twice")
    if not trailers.removal:
        problems.append("the trailer Removal is missing")
    if not trailers.test:
        problems.append("the trailer Test is missing")
    elif not _TEST.fullmatch(trailers.test):
        problems.append(f"Test {trailers.test!r} is not tests/steps/test_NAME.py")
    if not trailers.fails_before:
        problems.append("the trailer Fails-before is missing")
    elif trailers.failure is not None:
        try:
            re.compile(trailers.failure)
        except re.error as error:
            problems.append(f"Fails-before is not a regular expression: {error}")
    elif step.diff:
        problems.append(
            "Fails-before may say none only in a step that has no diff: this one"
            " changes " + ", ".join(step.touched)
        )
    for name in trailers.kernels:
        if not re.fullmatch(r"([a-z][a-z0-9_]*/)?[a-z][a-z0-9_]*", name):
            problems.append(f"Kernels {name!r} is not one module, as moe/experts")
    for file in step.files:
        if reason := forbidden(file.path):
            problems.append(f"{file.path}: {reason}")
        if file.creates:
            problems.append(
                f"{file.path}: a patch may not create a file: bring it as overlay"
            )
        if file.path.startswith(KERNEL_HOME + "/"):
            problems.append(
                f"{file.path} is a kernel: change it in kernels/xpu_dsv4, or in the"
                " commit that adds it"
            )
    return problems


def read_patch(release: str, path: Path) -> Step:
    """Read a step's patch; `step_problems` are not looked for.

    Raises:
        SeriesError: the file is missing, or as `parse_patch`.
        EnvironmentProblem: the file cannot be read.
    """
    with blaming(release, path):
        try:
            mail = read_file(path, path.parents[2])
        except FileNotFoundError:
            problem = "the series names a patch that does not exist"
            raise SeriesError(problem) from None
        return parse_patch(release, path, mail)


def parse_patch(release: str, path: Path, mail: bytes) -> Step:
    """The step of a patch with the content `mail`; `step_problems` are not looked for.

    Raises:
        SeriesError: it is not as this tool writes it, or its diff is malformed; `path`
            is `<file>:<line>` where known.
    """

    def refuse(message: str, line: int | None = None, detail: str = "") -> SeriesError:
        place = None if line is None else f"{path}:{line}"
        return SeriesError(message, path=place, detail=detail)

    head, mark, diff = mail.partition(b"\n---\n")
    offset = head.count(b"\n") + 2
    if b"\r" in head:
        line = head[: head.index(b"\r")].count(b"\n") + 1
        raise refuse("the message has a carriage return: lines end with LF alone", line)
    if not mark:
        raise refuse("the line `---` between message and diff is missing")
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        line = head[: error.start].count(b"\n") + 1
        raise refuse("the message is not UTF-8", line) from None
    if diff and not diff.startswith(b"diff --git "):
        raise refuse("the diff does not follow the line `---`", offset + 1)
    if without_ids(diff) != diff:
        raise refuse("the diff has lines of blob ids, which differ between releases")
    try:
        files = parse_diff(diff)
    except DiffError as error:
        place = f" (in {error.path})" if error.path else ""
        raise refuse(error.message + place, offset + error.line) from None
    try:
        subject, message, trailers = split_text(text.removeprefix(_HEADER))
    except ValueError as error:
        raise refuse(str(error), offset - 1) from None
    if match := _NO_MESSAGE.search(message):
        first = message[match.start() :].partition("\n")[0]
        raise refuse(f"a mail's message cannot have the line {first!r} there")
    step = Step(
        release, path.parent.name, path, subject, message, trailers, diff, files
    )
    canonical = format_patch(step)
    if canonical != mail:
        changes = difflib.unified_diff(
            mail.decode("utf-8", "replace").splitlines(),
            canonical.decode("utf-8", "replace").splitlines(),
            "the file",
            "as xpustack writes it",
            lineterm="",
            n=0,
        )
        raise refuse(
            "the patch is not as xpustack writes it", detail="\n".join(changes)
        )
    return step


def load_series(project: Project, release: str) -> list[Step]:
    """The steps of a release, oldest first.

    Raises:
        SeriesError: the first problem of the order file, a patch or a trailer.
            `static.check_static` lists all problems.
    """
    patches = read_patches(project, release).values()
    return [load_step(release, path) for path in patches]


def load_step(release: str, path: Path) -> Step:
    """The step of a release that has the patch `path`.

    Raises:
        SeriesError: the patch is malformed, or the step has a problem.
    """
    with blaming(release, path):
        step = read_patch(release, path)
        if problems := step_problems(step):
            hint = f"correct it in {path}, then xpustack check --static"
            raise SeriesError(problems[0], detail=problems[1:], hint=hint)
    return step
