# SPDX-License-Identifier: Apache-2.0
"""What a request changes of vLLM's own tests and pages, in place of the step's test.

`patches/<step>/request.diff` is a diff of `tests/` and `docs/` of the base. vLLM's
maintainers take small tests in the files that they have; a step's own test is thorough,
and stays here. `proofs` shows what the request's tests do.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stack.base.store import Writer
from stack.core.errors import SeriesError, concerning
from stack.core.files import read_file
from stack.core.git import GitFailed
from stack.core.project import Project
from stack.series.apply import misfit
from stack.series.diff import DiffError, FileDiff, parse_diff

NAME = "request.diff"
_FOLDERS = ("tests", "docs")
_HINT = "CONTRIBUTING.md: words for a reviewer"


@dataclass(frozen=True)
class RequestTests:
    """A request's own diff of vLLM's tests and pages."""

    slug: str
    path: Path
    diff: bytes
    files: tuple[FileDiff, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The test modules that it changes."""
        paths = [PurePosixPath(file.path) for file in self.files]
        return tuple(str(path) for path in paths if path.match("test_*.py"))

    def apply(self, writer: Writer, tree: str, release: str) -> None:
        """Change the private index of `writer`, which holds the tests of `tree`.

        Raises:
            SeriesError: the tree lacks a file, or the diff does not fit.
        """
        try:
            writer.apply(self.diff)
        except GitFailed as error:
            problem = misfit(writer, tree, self.files, error.stderr)
            raise SeriesError(
                f"the request's tests do not apply: {problem.message}",
                release=release,
                step=self.slug,
                path=f"{self.path}: {problem.path}" if problem.path else self.path,
                detail=problem.detail,
                hint=_HINT,
            ) from None


def read_request_tests(project: Project, slug: str) -> RequestTests | None:
    """The request's own tests of a step; None where nobody wrote any.

    Raises:
        SeriesError: it is no diff, changes what is neither test nor page, changes no
            test, or adds a file.
    """
    path = project.patches / slug / NAME
    try:
        with concerning(step=slug):
            diff = read_file(path, project.root)
    except FileNotFoundError:
        return None
    try:
        found = RequestTests(slug, path, diff, parse_diff(diff))
    except DiffError as error:
        raise SeriesError(
            error.message, step=slug, path=f"{path}:{error.line}", hint=_HINT
        ) from None
    for file in found.files:
        if file.path.partition("/")[0] not in _FOLDERS:
            raise _refused(found, f"{file.path} is neither a test nor a page of vLLM")
        if file.creates:
            raise _refused(found, f"vLLM has no {file.path}: extend a file that it has")
    if not found.modules:
        raise _refused(found, "it changes no test module of vLLM")
    return found


def _refused(tests: RequestTests, message: str) -> SeriesError:
    return SeriesError(message, step=tests.slug, path=tests.path, hint=_HINT)
