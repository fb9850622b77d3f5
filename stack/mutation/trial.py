# SPDX-License-Identifier: Apache-2.0
"""Runs a step's test on an installed tree of which one module has a fault."""

import difflib
import functools
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stack.base.store import Store
from stack.builds.installed import Build, byte_code_path
from stack.core.errors import CheckFailed
from stack.core.files import link_or_copy
from stack.core.process import clean_environment
from stack.forks.server import Ahead, ProgramExit, Server
from stack.mutation.mutants import Mutant, mutants
from stack.series.tree import KERNEL_HOME, PLUGIN_HOME, Step, StepTree
from stack.steptest.environment import NOT_COMPILED, vllm_variables
from stack.steptest.material import PLUGIN, Material
from stack.steptest.server import ENVIRONMENT
from stack.steptest.step_test import CPU, LIMIT, XPU, Platform
from stack.steptest.verdict import ModuleRun, judge_alone, judge_on_cpu

_PYTEST_OPTIONS = shlex.split(
    f"-p {PLUGIN} -c pytest.ini --rootdir . -q -x --failed-first --tb=line"
    " --strict-markers --no-header"
)
_LEAST, _TIMES = 20.0, 4.0
"""A run with a fault may take so many seconds, and so many times those without one."""


@dataclass(frozen=True)
class Planted:
    """A mutant of a module of vLLM, by the module's path in the tree."""

    path: str
    mutant: Mutant

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is, wherever the line moves."""
        return self.path, self.mutant.code, self.mutant.what

    def __str__(self) -> str:
        fault = self.mutant
        return f"{self.path}:{fault.line}: `{fault.code}`, {fault.what}"


def planted(store: Store, tree: StepTree) -> Iterator[Planted]:
    """The mutants of what a step adds to modules, its kernels aside."""
    changes = {
        change.path: change
        for change in store.git.changes(tree.parent.tree_id, tree.tree_id)
        if change.new and _is_ours(change.path)
    }
    texts = store.git.blobs(
        entry.blob
        for change in changes.values()
        for entry in (change.old, change.new)
        if entry
    )
    for path, change in changes.items():
        new = texts[change.new.blob].decode() if change.new else ""
        old = texts[change.old.blob].decode() if change.old else ""
        for mutant in mutants(new, added_lines(old, new)):
            yield Planted(path, mutant)


def _is_ours(path: str) -> bool:
    """Whether a module is installed, which vLLM's own tests are not, and no kernel."""
    installed = path.startswith(("vllm/", f"{PLUGIN_HOME}/")) and path.endswith(".py")
    return installed and not path.startswith(f"{KERNEL_HOME}/")


def added_lines(old: str, new: str) -> set[int]:
    """The lines of `new`, counted from 1, that `old` has not."""
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return {
        line + 1
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag != "equal"
        for line in range(start, end)
    }


class Trial:
    """A step's test on a copy of its tree, whose files are links to those of the build.

    Runs share imports unless these read the module, which they would keep without the
    fault. Tests that saw earlier faults run first.

    Args:
        work: an empty folder on the disk of the build.
        kernels: the version of vllm-xpu-kernels that the release pins.
    """

    def __init__(
        self,
        server: Server,
        work: Path,
        step: Step,
        build: Build,
        material: Material,
        kernels: str,
    ) -> None:
        self._server, self._work = server, work
        self._step, self._material, self._kernels = step, material, kernels
        self._site, self._limit = work / "site", LIMIT
        material.lay_out(work / "tests")
        material.support.lay_out(work / "support")
        for file in build.installed.rglob("*"):
            if file.is_file():
                target = self._site / file.relative_to(build.installed)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, target)

    def require_green(self) -> None:
        """Run the test without a fault. A run that takes a multiple of its time is seen
        as one that does not end.

        Raises:
            CheckFailed: it is red.
        """
        begin = time.monotonic()
        problems = self._problems()
        self._limit = min(LIMIT, _LEAST + _TIMES * (time.monotonic() - begin))
        if problems:
            raise CheckFailed(
                "the step's test fails without a fault",
                release=self._step.release,
                step=self._step.slug,
                path=self._step.trailers.test,
                detail=problems,
                hint=f"xpustack check {self._step.release} {self._step.slug}",
            )

    def survives(self, fault: Planted) -> bool:
        """Whether the test is green though the module has the fault."""
        module = self._site / fault.path
        whole = module.read_bytes()
        try:
            self._write(fault.path, fault.mutant.source.encode())
            return not self._problems(str(module))
        finally:
            self._write(fault.path, whole)

    def _write(self, path: str, content: bytes) -> None:
        """Replace a module; the build keeps its own file, and no byte code of another
        text is left."""
        for name in (path, byte_code_path(path)):
            (self._site / name).unlink(missing_ok=True)
        (self._site / path).write_bytes(content)

    def _problems(self, module: str = "") -> tuple[str, ...]:
        """Why the test is red, on the emulated XPU or then on vLLM's CPU platform;
        `module` is the path of the module that has a fault, if one has."""
        share = module not in self._read_by_imports
        problems = judge_alone(self._run(XPU, share))
        if not problems and self._material.any_platform:
            problems = judge_on_cpu(None, self._run(CPU, share=False))
        return problems

    @functools.cached_property
    def _read_by_imports(self) -> frozenset[str]:
        """The paths of all files that the shared imports read."""
        nothing, reads = self._work / "nothing.py", self._work / "reads.txt"
        nothing.touch()
        self._start([str(nothing)], XPU, share=True, reads=reads)
        return frozenset(reads.read_text().splitlines())

    def _run(self, platform: Platform, share: bool) -> ModuleRun:
        outcomes = self._work / "outcomes.json"
        outcomes.unlink(missing_ok=True)
        words = ["pytest", *_PYTEST_OPTIONS, "-p", platform.plugin]
        ended = self._start([*words, self._material.module], platform, share)
        try:
            run = msgspec.json.decode(outcomes.read_bytes(), type=ModuleRun)
        except (FileNotFoundError, msgspec.DecodeError):
            return ModuleRun(crash=f"it ended with {ended.status}")
        return ModuleRun(crash="it did not end") if ended.late else run

    def _start(
        self,
        words: list[str],
        platform: Platform,
        share: bool,
        reads: Path | None = None,
    ) -> ProgramExit:
        """Run a program beside the test on the tree as it is."""
        path, own = [self._site, self._work / "support"], self._work / "own"
        own.mkdir(exist_ok=True)
        variables = vllm_variables(self._kernels, platform.entry_point, own, path)
        switch = {} if self._material.compiled else NOT_COMPILED
        variables = {**ENVIRONMENT, **variables, **switch, "TMPDIR": str(own)}
        ahead = None
        if share and platform.ahead and not self._material.compiled:
            ahead = Ahead([platform.ahead], clean_environment(**variables))
        outcomes = self._work / "outcomes.json"
        return self._server.run(
            words,
            cwd=self._work / "tests",
            path=path,
            env=clean_environment(**variables, XPUSTACK_OUTCOMES=str(outcomes)),
            output=self._work / "output.txt",
            limit=self._limit,
            ahead=ahead,
            reads=reads,
        )
