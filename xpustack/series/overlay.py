# SPDX-License-Identifier: Apache-2.0
"""The files that a step adds besides its diff: overlay files and kernels.

Kernels import each other relatively. Inside vLLM they are in one package,
`vllm/model_executor/kernels/xpu_dsv4/`, with the package's `__init__.py` and a
`_triton.py` that imports Triton from vLLM.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from xpustack.base.archive import path_problem
from xpustack.core.errors import SeriesError
from xpustack.core.files import closure, imports, link_in, linked, read_file
from xpustack.core.project import Project
from xpustack.series.diff import forbidden
from xpustack.series.order import blaming
from xpustack.series.tree import KERNEL_HOME, Step

COMMON = "common"
PACKAGE = "__init__"
TRITON = "_triton"
_FOREIGN = {"kernels", "vllm"}
TRITON_IN_VLLM = b"""\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from vllm.triton_utils import tl, triton

__all__ = ["tl", "triton"]
"""


@dataclass(frozen=True)
class NewFile:
    """A file that a step adds: its content, and the file it is copied from."""

    content: bytes
    source: Path


class NewFiles:
    """The files that the steps of a series add, asked for in the series' order."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._kernels: set[str] = set()

    def of(self, step: Step) -> dict[str, NewFile]:
        """The files that the next step adds, by their path in the tree: its overlay
        files, its kernels and the modules that these import, without those that an
        earlier step adds.

        Raises:
            SeriesError: an overlay file or kernel is missing or a link, a path leaves
                the tree, or a kernel has an import that is not allowed.
        """
        with blaming(step.release, step.path):
            files = overlay_files(self._project, step)
            kernels = kernel_closure(self._project, step, self._kernels)
            self._kernels |= kernels.keys()
            return files | {f"{KERNEL_HOME}/{name}": kernels[name] for name in kernels}


def overlay_files(project: Project, step: Step) -> dict[str, NewFile]:
    """The overlay files that a step's trailers name: the release's own, else the common
    ones.

    Raises:
        SeriesError: as `NewFiles.of`.
    """
    with blaming(step.release, step.path):
        files = {}
        for path in step.trailers.overlay:
            if problem := path_problem(path) or forbidden(path):
                raise _refuse(f"Overlay {path!r}: {problem}", step.path)
            if path.startswith(KERNEL_HOME + "/"):
                raise _refuse(f"{path} is reserved for kernels", step.path)
            places = [project.overlay / name / path for name in (step.release, COMMON)]
            for place in places:
                if link := link_in(place, project.root):
                    raise linked(link)
            source = next((place for place in places if place.is_file()), None)
            if source is None:
                hint = f"create {places[-1]}"
                raise _refuse(f"the overlay has no {path}", step.path, hint)
            files[path] = NewFile(read_file(source, project.root), source)
        return files


def kernel_closure(
    project: Project, step: Step, present: Collection[str] = ()
) -> dict[str, NewFile]:
    """The files of a step's kernels and of the modules that they need (the package's
    `__init__`, `_triton`, relative imports), by their path in the package, sorted; none
    if there are no kernels.

    Args:
        present: paths to leave out, with what their modules need.

    Raises:
        SeriesError: an entry is missing; or a module is unreadable, or imports
            `kernels` or `vllm` by an absolute name.
    """
    with blaming(step.release, step.path):
        package, entries = kernel_package(project), step.trailers.kernels
        names = [PACKAGE, TRITON, *entries] if entries else []
        modules = [package / f"{name}.py" for name in names]
        for module in modules:
            if not module.is_file():
                problem = f"there is no kernel module {module.stem}"
                raise _refuse(problem, step.path, f"create {module}")
        try:
            found = closure(modules, package, lambda path: path.name in present)
        except (SyntaxError, ValueError) as error:
            raise _refuse(f"a kernel is not Python: {error}", package) from None
        files = {}
        for name, source in sorted(found.items()):
            content = read_file(source, project.root)
            # The words of `closure`, so that nothing is parsed twice.
            named = imports(content, str(source), ())
            if _FOREIGN & {each.split(".")[0] for each in named}:
                problem = "a kernel may not import kernels or vllm by an absolute name"
                raise _refuse(problem, source)
            files[name] = NewFile(content, source)
        if f"{TRITON}.py" in files:
            files[f"{TRITON}.py"] = NewFile(TRITON_IN_VLLM, package / f"{TRITON}.py")
        return files


def needed_kernels(project: Project, step: Step) -> dict[str, bytes]:
    """The kernels that a step needs, at their paths in the tree. The step brings those
    that the tree before it lacks, even if an earlier step brought them."""
    files = kernel_closure(project, step)
    return {f"{KERNEL_HOME}/{name}": file.content for name, file in files.items()}


def kernel_package(project: Project) -> Path:
    """The folder of the kernels in this repository."""
    return project.kernels / "xpu_dsv4"


def _refuse(message: str, path: Path | str, hint: str = "") -> SeriesError:
    hint = hint or f"correct {path}, then run xpustack check --static"
    return SeriesError(message, path=path, hint=hint)
