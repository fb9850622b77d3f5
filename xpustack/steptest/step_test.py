# SPDX-License-Identifier: Apache-2.0
"""A step's test module on the emulated XPU, against one installed wheel."""

import ast
import functools
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xpustack.base.releases import Release
from xpustack.builds.build import Build
from xpustack.core import fingerprint
from xpustack.core.cache import Cache
from xpustack.core.errors import SeriesError
from xpustack.core.process import clean_environment
from xpustack.core.project import Project
from xpustack.core.syntax import parse_python
from xpustack.series.patch import Step
from xpustack.steptest.server import ENVIRONMENT, Ended, Server, described
from xpustack.steptest.verdict import Figure, Run, judge, judge_alone

TARGET = 20.0
LIMIT = 300.0
RECIPE = (
    *("steptest.outcomes", "steptest.server", "steptest.server_program"),
    *("steptest.step_test", "steptest.verdict", "core.fingerprint", "core.process"),
)
PIN_VARIABLE = "EMULATED_XPU_KERNELS"
"""Tells the emulation which vllm-xpu-kernels it stands for."""
IMPORT_IS_THE_DEFECT = frozenset({"platform-guards"})
_PLUGIN = "xpustack_outcomes"
_ALWAYS = ("conftest.py", "layout.py")
_ENTRY_POINTS = "vllm.platform_plugins"
_COMPILED = "pytest.mark.compiled"
_TO_THE_END = frozenset({0, 1, 5})
"""pytest's exit statuses when all passed, when some failed, when there is no test."""
_INTERRUPTED = 2
"""The one after a collection error, and after `pytest.exit`."""
_SHOWN = 30


@dataclass(frozen=True)
class Tested:
    """The verdict on a step's test.

    `problems` is empty if the step is proven; `counts` has `tests`,
    `failed_before` and `skipped`; `warnings` and `skips` are for people;
    `output` is the end of the run to look at; `seconds` is of both runs; `figures`
    say what each test found that failed before.
    """

    problems: tuple[str, ...]
    counts: Mapping[str, int]
    warnings: tuple[str, ...]
    skips: tuple[str, ...]
    output: tuple[str, ...]
    seconds: float
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Support:
    """What every step test of a project needs beside its own files: the emulation,
    and the kernels that the emulation repairs. One of these serves one run."""

    project: Project
    files: Mapping[str, Path]
    digest: str
    entry_points: str

    @classmethod
    def of(cls, project: Project) -> "Support":
        """The project's files as they are now."""
        files = {
            name: file
            for folder in (project.emulation, project.kernels)
            for name, file in fingerprint.folder_files(folder).items()
        }
        digest = fingerprint.files_digest(files)
        return cls(project, files, digest, _entry_points(project))


@dataclass(frozen=True)
class Material:
    """The files of a run by the names they get there: the test with its local
    closure, and what every step test needs."""

    module: str
    tests: Mapping[str, Path]
    support: Support

    @property
    def compiled(self) -> bool:
        """Whether the module says, with the marker `compiled`, that it tests what
        torch.compile makes. All others run without it, in a fraction of the time."""
        path = self.tests[self.module]
        return any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == _COMPILED
            for node in ast.walk(parse_python(path.read_bytes(), str(path)))
        )

    @property
    def digest(self) -> str:
        return fingerprint.digest(
            module=self.module,
            tests=fingerprint.files_digest(self.tests),
            support=self.support.digest,
            entry_points=self.support.entry_points,
        )


def material_of(support: Support, step: Step) -> Material:
    """Collect what the step's test needs.

    Raises:
        SeriesError: the step names no test module, or one that does not exist.
    """
    root = support.project.root
    path = root / step.trailers.test if step.trailers.test else None
    if path is None or not path.is_file():
        raise SeriesError(
            "the step's test module does not exist" if path else "no trailer Test",
            release=step.release,
            step=step.slug,
            path=path or step.path,
            hint="xpustack check --static",
        )
    return Material(path.name, closure(path), support)


def closure(module: Path) -> dict[str, Path]:
    """`module` and the files beside it that it imports, directly or not, with
    `layout.py` and `conftest.py`, by name relative to its folder."""
    folder = module.parent
    found: dict[str, Path] = {}
    queue = [module, *(folder / name for name in _ALWAYS)]
    while queue:
        path = queue.pop()
        name = path.relative_to(folder).as_posix()
        if name in found or not path.is_file():
            continue
        found[name] = path
        if path.suffix == ".py":
            for imported in _imports(path.read_bytes(), str(path)):
                top = folder / imported.partition(".")[0]
                queue.append(top.with_suffix(".py"))
                if top.is_dir():
                    queue += fingerprint.folder_files(top).values()
    return found


@dataclass(frozen=True)
class StepTest:
    """A step's test with all that its result depends on: the one way to look for a
    stored result and to make a new one.

    `before` is None where the test is to pass on the tree `after` alone, `kernels`
    is the version of vllm-xpu-kernels that the release pins.
    """

    step: Step
    material: Material
    before: Build | None
    after: Build
    kernels: str

    @classmethod
    def of(
        cls,
        support: Support,
        release: Release,
        step: Step,
        before: Build | None,
        after: Build,
    ) -> "StepTest":
        """The test as the project's files have it now.

        Raises:
            SeriesError: the step names no test module, or one that does not exist.
        """
        kernels = release.xpu_kernels.version
        return cls(step, material_of(support, step), before, after, kernels)

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
            tool=fingerprint.tool(*RECIPE),
            environment=fingerprint.lock(),
        )
        return f"test-{key}"

    def run(self, server: Server, cache: Cache) -> Tested:
        """Run the module on both trees, or on `after` alone, and judge.

        Raises:
            EnvironmentProblem: no room, or no process can be started.
            Stopped: the runner was stopped.
        """
        with cache.scratch() as work:
            _lay_out(work, self.material)
            first = self._direction(server, work, self.before) if self.before else None
            second = self._direction(server, work, self.after)
        if first is None:
            problems = judge_alone(second)
        else:
            problems = judge(
                first,
                second,
                self.step.trailers.failure,
                imports=self.step.slug in IMPORT_IS_THE_DEFECT,
            )
        return _tested(problems, first, second)

    def _direction(self, server: Server, work: Path, build: Build) -> Run:
        """One tree. Neither the repository nor the caller's folder is on the path, so
        that `import vllm` can only mean the wheel."""
        outcomes, output = work / "outcomes.json", work / "output.txt"
        outcomes.unlink(missing_ok=True)
        path = [build.installed, work / "support"]
        extra = {PIN_VARIABLE: self.kernels}
        if not self.material.compiled:
            extra["TORCHDYNAMO_DISABLE"] = "1"
        ended = server.run(
            [
                *("-p", "no:cacheprovider"),
                *("-p", _PLUGIN, "-p", "emulated_xpu.pytest_plugin"),
                *("-c", "pytest.ini", "--rootdir", ".", "-q", "--tb=short"),
                *("--strict-markers", "--no-header", self.material.module),
            ],
            cwd=work / "tests",
            path=path,
            env=clean_environment(
                **ENVIRONMENT,
                PYTHONPATH=":".join(map(str, path)),
                TMPDIR=str(work),
                TRITON_CACHE_DIR=str(work / "triton"),
                VLLM_CACHE_ROOT=str(work / "vllm-cache"),
                VLLM_CONFIG_ROOT=str(work / "vllm-config"),
                VLLM_NO_USAGE_STATS="1",
                VLLM_PLUGINS="emulated_xpu",
                XPUSTACK_OUTCOMES=str(outcomes),
                **extra,
            ),
            output=output,
            limit=LIMIT,
        )
        try:
            run = msgspec.json.decode(outcomes.read_bytes(), type=Run)
        except (FileNotFoundError, msgspec.DecodeError):
            run = None
        crash = _crash(ended, run)
        said = output.read_text("utf-8", "replace") if output.is_file() else ""
        return msgspec.structs.replace(
            Run() if run is None or crash else run,
            crash=crash,
            output=tuple(said.rstrip().splitlines()[-_SHOWN:]),
            seconds=ended.seconds,
            notes=ended.notes,
        )


def _crash(ended: Ended, run: Run | None) -> str:
    """Why the outcomes of a run do not count, empty if they do."""
    if ended.late:
        return f"killed after {LIMIT:.0f} s"
    if ended.died:
        return ended.died
    uncollected = run is not None and any(e.outcome == "failed" for e in run.collection)
    to_the_end = ended.status in _TO_THE_END or (
        ended.status == _INTERRUPTED and uncollected
    )
    return "" if run is not None and to_the_end else f"it {described(ended.status)}"


def _tested(problems: tuple[str, ...], first: Run | None, second: Run) -> Tested:
    runs = [("before", first), ("after", second)]
    skipped = [test for test in second.tests if test.outcome == "skipped"]
    before_matters = problems and first is not None and not judge_alone(second)
    slow = tuple(
        f"{run.seconds:.0f} s {when} the step: a direction should take at most"
        f" {TARGET:.0f} s"
        for when, run in runs
        if run is not None and run.seconds > TARGET
    )
    return Tested(
        problems=problems,
        counts={
            "tests": len(second.tests),
            "failed_before": sum(
                test.outcome in ("failed", "error")
                for test in (first.tests if first else ())
            ),
            "skipped": len(skipped),
        },
        warnings=(*slow, *(first.notes if first else ()), *second.notes),
        skips=tuple(f"{test.name}: {test.text}" for test in skipped),
        output=(first if first is not None and before_matters else second).output,
        seconds=sum(run.seconds for _, run in runs if run is not None),
        figures=_figures(first, second) if first is not None else (),
    )


def _figures(before: Run, after: Run) -> tuple[Figure, ...]:
    """What each test that failed before found then, and what it finds now."""
    now = {test.id: test for test in after.tests}
    return tuple(
        Figure(test.name, test.text.partition("\n")[0], now[test.id].figure)
        for test in before.tests
        if test.outcome in ("failed", "error") and test.id in now
    )


def _lay_out(work: Path, material: Material) -> None:
    copies = {f"tests/{name}": path for name, path in material.tests.items()}
    copies |= {f"support/{name}": path for name, path in material.support.files.items()}
    copies[f"support/{_PLUGIN}.py"] = Path(__file__).with_name("outcomes.py")
    for name, path in copies.items():
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    distribution = work / "support" / "emulated_xpu-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: emulated-xpu\nVersion: 0\n"
    )
    (distribution / "entry_points.txt").write_text(material.support.entry_points)
    (work / "tests" / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")


@functools.cache
def _imports(source: bytes, name: str) -> tuple[str, ...]:
    """The modules that a file imports, relative ones without their dots. Many step
    tests import the same files, and parsing takes milliseconds."""
    modules: list[str] = []
    for node in ast.walk(parse_python(source, name)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [node.module] if node.module else []
            modules += [alias.name for alias in node.names if node.level]
    return tuple(modules)


def _entry_points(project: Project) -> str:
    """The plugins that the project registers, as installed metadata has them."""
    path = project.root / "pyproject.toml"
    described = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    groups = described.get("project", {}).get("entry-points", {})
    lines = [f"{key} = {value}" for key, value in groups.get(_ENTRY_POINTS, {}).items()]
    return "\n".join([f"[{_ENTRY_POINTS}]", *lines, ""])
