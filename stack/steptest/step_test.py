# SPDX-License-Identifier: Apache-2.0
"""Run a step's test module against an installed wheel: on the emulated XPU, and what
other platforms have on vLLM's CPU platform."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stack.builds.installed import Build
from stack.core import fingerprint
from stack.core.cache import Cache
from stack.core.process import clean_environment
from stack.forks.program import ANY
from stack.forks.server import Ahead, ProgramExit, Server, exit_text
from stack.series.result import Figure, Result
from stack.series.tree import Step
from stack.steptest.environment import NOT_COMPILED, vllm_variables
from stack.steptest.material import PLUGIN, Material
from stack.steptest.server import ENVIRONMENT
from stack.steptest.verdict import ModuleRun, judge, judge_alone, judge_on_cpu

TARGET = 20.0
LIMIT = 300.0
IMPORT_IS_THE_DEFECT = frozenset({"platform-guards"})
_FINISHED = frozenset({0, 1, 5})
"""pytest's exit statuses when all passed, when some failed, when there is no test."""
_INTERRUPTED = 2
"""The one after a collection error, and after `pytest.exit`."""
_PYTEST_OPTIONS = shlex.split(
    f"-p no:cacheprovider -p {PLUGIN}"
    " -c pytest.ini --rootdir . -q --tb=short --strict-markers --no-header"
)
_SHOWN = 30


@dataclass(frozen=True)
class Platform:
    """A platform of vLLM that a module can run on here: the entry point that names it,
    the pytest plugin that prepares it, and a module that imports what nearly every
    test imports."""

    entry_point: str
    plugin: str
    ahead: str | None = None


XPU = Platform(
    "emulated_xpu", "standins.emulated_xpu.pytest_plugin", "standins.emulated_xpu.ahead"
)
CPU = Platform("plain_cpu", "standins.emulated_xpu.cpu_pytest_plugin")


@dataclass(frozen=True)
class StepTest:
    """A step's test with all that its result depends on: `key` finds a stored result,
    `run` makes a new one.

    `before` is None where the test only has to pass on the tree `after`; `kernels` is
    the version of vllm-xpu-kernels that the release pins.
    """

    step: Step
    material: Material
    before: Build | None
    after: Build
    kernels: str

    def now(self) -> "StepTest":
        """The test with its module and what that imports read again: people edit them
        while a run of checks goes on."""
        module, support = self.material.module, self.material.support
        path = self.material.tests[module]
        return replace(self, material=support.material(path, now=True))

    @property
    def key(self) -> str:
        """Where the cache keeps the result."""
        key = fingerprint.digest(
            release=self.step.release,
            step=self.step.slug,
            failure=self.step.trailers.failure or "",
            before=self.before.key if self.before else "",
            after=self.after.key,
            material=self.material.digest,
            kernels=self.kernels,
            tool=fingerprint.tool("steptest.step_test", "steptest.outcomes"),
            environment=fingerprint.lock(),
        )
        return f"test-{key}"

    def run(self, server: Server, cache: Cache, support: Path) -> Result:
        """Run the module on both trees, or on `after` alone, and judge.

        On both trees its tests marked `any_platform` also run on vLLM's CPU platform,
        where no emulation can hide that the step changes another platform.

        Args:
            support: where the material's support is laid out.

        Raises:
            EnvironmentProblem: the disk is full, or no process can be started.
            Stopped: the runner was stopped.
        """
        with cache.scratch() as work:
            self.material.lay_out(work / "tests")
            if self.before is None:
                second = self._run_module(server, support, work, self.after, XPU)
                return self._result(judge_alone(second), None, second, ())
            first = self._run_module(server, support, work, self.before, XPU)
            second = self._run_module(server, support, work, self.after, XPU)
            on_cpu = tuple(
                self._run_module(server, support, work, build, CPU)
                for build in (self.before, self.after)
                if self.material.any_platform
            )
        problems = judge(
            first,
            second,
            self.step.trailers.failure,
            imports=self.step.slug in IMPORT_IS_THE_DEFECT,
        )
        if on_cpu:
            collected = not (first.crash or first.collection)
            problems += judge_on_cpu(on_cpu[0] if collected else None, on_cpu[1])
        return self._result(problems, first, second, on_cpu)

    def _run_module(
        self,
        server: Server,
        support: Path,
        work: Path,
        build: Build,
        platform: Platform,
    ) -> ModuleRun:
        """Run the module on one tree. Neither the repository nor the caller's folder is
        on the path, so `import vllm` can only find the wheel."""
        outcomes, output = work / "outcomes.json", work / "output.txt"
        reads = work / "reads.txt"
        for file in (outcomes, reads):
            file.unlink(missing_ok=True)
        path = [build.installed, support]
        compiled = self.material.compiled

        def environment(own: Path, **more: str) -> dict[str, str]:
            """What a run sees, or imports that runs share, with a folder of its own."""
            variables = vllm_variables(self.kernels, platform.entry_point, own, path)
            switch = {} if compiled else NOT_COMPILED
            return clean_environment(
                **{**ENVIRONMENT, **variables, **switch, "TMPDIR": str(own)}, **more
            )

        ahead = None
        if platform.ahead and not compiled:
            ahead = Ahead([platform.ahead], environment(support / "imports"))
        pytest_exit = server.run(
            ["pytest", *_PYTEST_OPTIONS, "-p", platform.plugin, self.material.module],
            cwd=work / "tests",
            path=path,
            env=environment(work, XPUSTACK_OUTCOMES=str(outcomes)),
            output=output,
            limit=LIMIT,
            ahead=ahead,
            reads=reads,
        )
        try:
            run = msgspec.json.decode(outcomes.read_bytes(), type=ModuleRun)
        except (FileNotFoundError, msgspec.DecodeError):
            run = None
        crash = _crash(pytest_exit, run)
        printed = output.read_text("utf-8", "replace") if output.is_file() else ""
        # A run that was killed says nothing, and does not pass.
        opened = reads.read_text().splitlines() if reads.is_file() else [ANY]
        return msgspec.structs.replace(
            ModuleRun() if run is None or crash else run,
            crash=crash,
            output=tuple(printed.rstrip().splitlines()[-_SHOWN:]),
            seconds=pytest_exit.seconds,
            reads=tuple(self.material.support.read_by(opened, support)),
        )

    def _result(
        self,
        problems: tuple[str, ...],
        first: ModuleRun | None,
        second: ModuleRun,
        on_cpu: Sequence[ModuleRun],
    ) -> Result:
        runs = [("before the step", first), ("after the step", second)]
        names = ("before the step on a CPU", "after the step on a CPU")
        runs += zip(names, on_cpu, strict=False)
        notes = [
            f"{run.seconds:.0f} s {when}: a run should take at most {TARGET:.0f} s"
            for when, run in runs
            if run is not None and run.seconds > TARGET
        ]
        skipped = [test for test in second.tests if test.outcome == "skipped"]
        notes += [f"skipped: {test.name}: {test.text}" for test in skipped]
        summary = f"{len(second.tests)} tests"
        if first is not None:
            summary += f", {sum(test.red for test in first.tests)} fail before"
        if elsewhere := [t for run in on_cpu[1:] for t in run.tests if t.any_platform]:
            summary += f", {len(elsewhere)} on a CPU too"
        if skipped:
            summary += f", {len(skipped)} skipped"
        support = self.material.support
        reads = {name for _, run in runs if run is not None for name in run.reads}
        shown = [run for run in on_cpu if judge_on_cpu(None, run)]
        if not shown:
            before_matters = first is not None and not judge_alone(second)
            shown = [first if first is not None and before_matters else second]
        return Result(
            self.step.release,
            self.step.slug,
            "test",
            "failed" if problems else "passed",
            sum(run.seconds for _, run in runs if run is not None),
            summary=summary,
            detail=(*problems, "", *shown[-1].output) if problems else (),
            notes=tuple(notes),
            tip=self.before is None,
            figures=_figures(first, second) if first is not None else (),
            reads={name: support.digests[name] for name in sorted(reads)},
        )


def _crash(pytest_exit: ProgramExit, run: ModuleRun | None) -> str:
    """Why the outcomes of a run do not count, empty if they do."""
    if pytest_exit.late:
        return f"killed after {LIMIT:.0f} s"
    uncollected = run is not None and any(
        problem.outcome == "failed" for problem in run.collection
    )
    finished = pytest_exit.status in _FINISHED or (
        pytest_exit.status == _INTERRUPTED and uncollected
    )
    return "" if run is not None and finished else f"it {exit_text(pytest_exit.status)}"


def _figures(before: ModuleRun, after: ModuleRun) -> tuple[Figure, ...]:
    """The figures, before and after the step, of each test that failed before."""
    later = {test.id: test for test in after.tests}
    return tuple(
        Figure(test.name, test.text.partition("\n")[0], later[test.id].figure)
        for test in before.tests
        if test.red and test.id in later
    )
