# SPDX-License-Identifier: Apache-2.0
"""The files that a step adds besides its diff: overlay files and kernels.

Kernels import each other relatively. Inside vLLM they are in one package,
`vllm/model_executor/kernels/xpu_dsv4/`, with a folder for each op, the `__init__.py` of
both and a `_triton.py` that imports Triton from vLLM.
"""

import ast
import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from stack.base.archive import path_problem
from stack.core.errors import SeriesError
from stack.core.files import link_in, linked, parse_python, read_file
from stack.core.project import Project
from stack.series.diff import forbidden
from stack.series.order import blaming
from stack.series.tree import KERNEL_HOME, Step

COMMON = "common"
PACKAGE = "__init__"
TRITON = "_triton"
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
    """The files of a step's kernels and of the modules that they need (the `__init__`
    of their folders, `_triton`, relative imports), by their path in the package,
    sorted; none if there are no kernels.

    Args:
        present: paths to leave out, with what their modules need.

    Raises:
        SeriesError: a module is missing or unreadable, or imports from above its
            package, or imports `kernels` or `vllm` by an absolute name.
    """
    with blaming(step.release, step.path):
        files: dict[str, NewFile] = {}
        entries = step.trailers.kernels
        queue = [PACKAGE, TRITON, *entries] if entries else []
        while queue:
            name = queue.pop()
            if f"{name}.py" in files or f"{name}.py" in present:
                continue
            source = kernel_package(project) / f"{name}.py"
            if not source.is_file():
                problem = f"there is no kernel module {name}"
                raise _refuse(problem, step.path, f"create {source}")
            file = NewFile(read_file(source, project.root), source)
            if name == TRITON:
                files[f"{name}.py"] = NewFile(TRITON_IN_VLLM, source)
                continue
            files[f"{name}.py"] = file
            folder = name.rpartition("/")[0]
            queue += [f"{folder}/{PACKAGE}"] if folder else []
            queue += _relative_imports(file.content, source, folder)
        return dict(sorted(files.items()))


def needed_kernels(project: Project, step: Step) -> dict[str, bytes]:
    """The kernels that a step needs, at their paths in the tree. The step brings those
    that the tree before it lacks, even if an earlier step brought them."""
    files = kernel_closure(project, step)
    return {f"{KERNEL_HOME}/{name}": file.content for name, file in files.items()}


def kernel_package(project: Project) -> Path:
    """The folder of the kernels in this repository."""
    return project.kernels / "xpu_dsv4"


@functools.cache
def _relative_imports(content: bytes, source: Path, folder: str) -> tuple[str, ...]:
    """The modules of the package that a kernel in one of its folders ("" for none)
    imports. Cached: all steps of all releases need the same few."""
    try:
        nodes = list(ast.walk(parse_python(content)))
    except (SyntaxError, ValueError) as error:
        raise _refuse(f"the kernel is not Python: {error}", source) from None
    names: list[str] = []
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        place = f"{source}:{node.lineno}"
        named = [alias.name for alias in node.names]
        level = 0
        if isinstance(node, ast.ImportFrom):
            named, level = [node.module] if node.module else named, node.level
        if level > (2 if folder else 1):
            raise _refuse("a kernel imports from above its package", place)
        if level:
            start = f"{folder}/" if folder and level == 1 else ""
            package = source.parents[1] if folder else source.parent
            for name in (start + name.replace(".", "/") for name in named):
                # Of a folder the names are modules.
                inner = node.names if (package / name).is_dir() else []
                names += [f"{name}/{alias.name}" for alias in inner] or [name]
        elif any(name.split(".")[0] in ("kernels", "vllm") for name in named):
            problem = "a kernel may not import kernels or vllm by an absolute name"
            raise _refuse(problem, place)
    return tuple(names)


def _refuse(message: str, path: Path | str, hint: str = "") -> SeriesError:
    hint = hint or f"correct {path}, then run xpustack check --static"
    return SeriesError(message, path=path, hint=hint)
