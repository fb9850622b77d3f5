# SPDX-License-Identifier: Apache-2.0
"""A step's files in the form that upstream uses.

Kernels import Triton from `vllm.triton_utils`, not from the `_triton` module. Tests
and the files beside them that they import become one package next to upstream's tests
of the same model, without this repository's marker. The base's own ruff then sorts
the imports. A comparison of syntax trees verifies that nothing else changes.
"""

import ast
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from stack.core.errors import SeriesError
from stack.core.files import parse_python
from stack.core.markdown import rendered
from stack.core.process import Runner, clean_environment
from stack.series.overlay import TRITON
from stack.series.tree import KERNEL_HOME, Step

TEST_HOME = "tests/models/deepseek_v4/xpu"
FIRST = "tests"
"""What the branch of the first commit is called after."""
FIRST_SUBJECT = "[Test][XPU][DSv4] Add what DeepSeek-V4's tests on XPU share"
FIRST_MESSAGE = f"""\
{FIRST_SUBJECT}

Tests of DeepSeek-V4 on XPU build its layers, caches and metadata. Add the functions
that do so, and one CI job that runs the folder on an XPU; on a CPU another runs the
tests that need no XPU. The requests that follow bring their test files alone."""
SPDX = b"# SPDX-License-Identifier: Apache-2.0\n"
HEADER = SPDX + (
    b"# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
ANY_PLATFORM = b"pytest.mark.any_platform"
_TRITON = re.compile(rb"^from \.\.?_triton import ", re.MULTILINE)
_MARKER = re.compile(rb"^@pytest\.mark\.unchanged\n", re.MULTILINE)
_OWN_FILES = ("conftest.py",)
_FIRST_PARTY = "lint.isort.known-first-party = ['tests', 'vllm']"


def kernel(content: bytes) -> bytes:
    """A kernel module that imports Triton from vLLM instead of `_triton`."""
    return _TRITON.sub(b"from vllm.triton_utils import ", content)


def package(closure: Mapping[str, Path]) -> dict[str, bytes]:
    """The package of a test and what it imports, by paths in the tree.

    Args:
        closure: the files by their names beside the test, as `core.files.closure`
            returns them.
    """
    names = {PurePosixPath(name).parts[0].removesuffix(".py") for name in closure}
    only_xpu = rendered("stack.upstream", "conftest.py", {})
    files = {f"{TEST_HOME}/conftest.py": only_xpu.encode()}
    folder = PurePosixPath(TEST_HOME)
    while str(folder) != "tests":
        files[f"{folder}/__init__.py"] = HEADER
        folder = folder.parent
    for name, path in closure.items():
        if name not in _OWN_FILES:
            files[f"{TEST_HOME}/{name}"] = _test(path.read_bytes(), names)
    return files


def upstream_test(step: Step) -> str:
    """The path of a step's test upstream."""
    return f"{TEST_HOME}/{PurePosixPath(step.trailers.test or '').name}"


def tidy(
    files: Mapping[str, bytes],
    configuration: bytes,
    folder: Path,
    runner: Runner,
    *,
    release: str,
) -> dict[str, bytes]:
    """Sort imports and format files as the base's `pyproject.toml` says.

    Args:
        files: Python files by their paths in the tree.
        configuration: the base's `pyproject.toml`.
        folder: an empty directory to work in.

    Raises:
        SeriesError: ruff refuses a file, or changes more than its imports.
    """
    (folder / "pyproject.toml").write_bytes(configuration)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    ruff = [sys.executable, "-m", "ruff"]
    # ruff recognizes a first-party import by its file, which is not here.
    rules = ["--select", "I,F401,D413", "--config", _FIRST_PARTY]
    for arguments in (
        ["check", *rules, "--fix", "--no-cache", "--", *files],
        ["format", "--no-cache", "--", *files],
    ):
        done = runner.run(
            [*ruff, *arguments], cwd=folder, env=clean_environment(), timeout=120
        )
        if done.returncode:
            raise SeriesError(
                "ruff refuses the exported files",
                release=release,
                path=shlex.join(["ruff", *arguments[: -len(files)]]),
                detail=done.last_lines(10),
                hint="xpustack check " + release,
            )
    tidied = {path: (folder / path).read_bytes() for path in files}
    for path, content in files.items():
        if _program(content) != _program(tidied[path]):
            raise SeriesError(
                "ruff would change more than the imports of the exported file",
                release=release,
                path=path,
                hint=f"xpustack check {release}",
            )
    return tidied


def is_kernel(path: str) -> bool:
    """Whether a file of a tree is one of this stack's kernels."""
    return path.startswith(KERNEL_HOME + "/")


def is_shim(path: str) -> bool:
    """Whether a file is `_triton`, through which the kernels import Triton."""
    return path == f"{KERNEL_HOME}/{TRITON}.py"


def _test(content: bytes, names: set[str]) -> bytes:
    """One file of the package: header, no marker, siblings by relative imports."""
    if content.startswith(SPDX) and not content.startswith(HEADER):
        content = HEADER + content.removeprefix(SPDX)
    content = _MARKER.sub(b"", content)
    lines = content.decode().splitlines(keepends=True)
    for node in ast.walk(parse_python(content)):
        if isinstance(node, ast.Import):
            siblings = [alias for alias in node.names if alias.name in names]
            if siblings and len(node.names) == 1:
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = line.replace("import ", "from . import ", 1)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").partition(".")[0] in names:
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = line.replace("from ", "from .", 1)
    return "".join(lines).encode()


def _program(content: bytes) -> str:
    """A file's syntax tree without its imports and the ends of its docstrings."""

    class Imports(ast.NodeTransformer):
        def visit_Import(self, node: ast.Import) -> None:
            return None

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            return None

        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            if isinstance(node.value, str):
                node.value = node.value.rstrip()
            return node

    return ast.dump(Imports().visit(parse_python(content)))
