# SPDX-License-Identifier: Apache-2.0
"""A step's test module on the emulated XPU, against one installed wheel."""

import ast
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xpustack import environment
from xpustack.build import Build
from xpustack.cache import Cache
from xpustack.errors import SeriesError
from xpustack.process import TIMED_OUT, Runner, clean_environment
from xpustack.project import Project
from xpustack.results import Figure
from xpustack.series import Step
from xpustack.syntax import parse
from xpustack.verdict import Run, judge, judge_alone

TARGET = 20.0
LIMIT = 300.0
RECIPE = ("steptest", "outcomes", "verdict", "build", "process", "environment")
IMPORT_IS_THE_DEFECT = frozenset({"platform-guards"})
_PLUGIN = "xpustack_outcomes"
_ALWAYS = ("conftest.py", "layout.py")
_ENTRY_POINTS = "vllm.platform_plugins"


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
class Material:
    """The files of a run by the names they get there: the test with its local
    closure, the emulation, and the kernels that the emulation repairs."""

    module: str
    tests: Mapping[str, Path]
    support: Mapping[str, Path]
    entry_points: str

    @property
    def digest(self) -> str:
        return environment.digest(
            module=self.module,
            tests=environment.files_digest(self.tests),
            support=environment.files_digest(self.support),
            entry_points=self.entry_points,
        )


def material(project: Project, step: Step) -> Material:
    """Collect what the step's test needs.

    Raises:
        SeriesError: the step names no test module, or one that does not exist.
    """
    path = project.root / step.trailers.test if step.trailers.test else None
    if path is None or not path.is_file():
        raise SeriesError(
            "the step's test module does not exist" if path else "no trailer Test",
            release=step.release,
            step=step.slug,
            path=path or step.path,
            hint="xpustack check --static",
        )
    support = {
        name: file
        for folder in (project.emulation, project.kernels)
        for name, file in environment.folder_files(folder).items()
    }
    return Material(
        module=path.name,
        tests=closure(path),
        support=support,
        entry_points=_entry_points(project),
    )


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
            for imported in _imports(path):
                top = folder / imported.partition(".")[0]
                queue.append(top.with_suffix(".py"))
                if top.is_dir():
                    queue += environment.folder_files(top).values()
    return found


def key_of(step: Step, stuff: Material, before: Build | None, after: Build) -> str:
    return environment.digest(
        step=step.slug,
        failure=step.trailers.failure or "",
        before=before.key if before else "",
        after=after.key,
        material=stuff.digest,
        tool=environment.tool(*RECIPE),
        environment=environment.lock(),
    )


def test(
    runner: Runner,
    cache: Cache,
    step: Step,
    stuff: Material,
    before: Build | None,
    after: Build,
    pins: Mapping[str, str],
) -> Tested:
    """Run the module on both trees (`before` None: on `after` alone) and judge.

    Args:
        pins: environment variables that tell the emulation what it stands for.

    Raises:
        EnvironmentProblem: no room.
        Stopped: the runner was stopped.
    """
    with cache.scratch() as work:
        _lay_out(work, stuff)
        first = _run(runner, work, stuff, before, pins) if before else None
        second = _run(runner, work, stuff, after, pins)
    if first is None:
        problems = judge_alone(second)
    else:
        problems = judge(
            first,
            second,
            step.trailers.failure,
            imports=step.slug in IMPORT_IS_THE_DEFECT,
        )
    runs = [("before", first), ("after", second)]
    skipped = [test for test in second.tests if test.outcome == "skipped"]
    before_matters = problems and first is not None and not judge_alone(second)
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
        warnings=tuple(
            f"{run.seconds:.0f} s {when} the step: a direction should take at most"
            f" {TARGET:.0f} s"
            for when, run in runs
            if run is not None and run.seconds > TARGET
        ),
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


def _lay_out(work: Path, stuff: Material) -> None:
    copies = {f"tests/{name}": path for name, path in stuff.tests.items()}
    copies |= {f"support/{name}": path for name, path in stuff.support.items()}
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
    (distribution / "entry_points.txt").write_text(stuff.entry_points)
    (work / "tests" / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")


def _run(
    runner: Runner,
    work: Path,
    stuff: Material,
    build: Build,
    pins: Mapping[str, str],
) -> Run:
    """One direction. Neither the repository nor the caller's folder is on the
    path, so that `import vllm` can only mean the wheel."""
    outcomes = work / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    done = runner.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-p", _PLUGIN, "-p", "emulated_xpu.pytest_plugin"),
            *("-c", "pytest.ini", "--rootdir", ".", "-q", "--tb=short"),
            *("--strict-markers", "--no-header", stuff.module),
        ],
        cwd=work / "tests",
        env=clean_environment(
            CUDA_VISIBLE_DEVICES="",
            HF_HUB_OFFLINE="1",
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            PYTHONPATH=f"{build.installed}:{work / 'support'}",
            TMPDIR=str(work),
            TRITON_CACHE_DIR=str(work / "triton"),
            TRITON_INTERPRET="1",
            TRANSFORMERS_OFFLINE="1",
            VLLM_CACHE_ROOT=str(work / "vllm-cache"),
            VLLM_CONFIG_ROOT=str(work / "vllm-config"),
            VLLM_NO_USAGE_STATS="1",
            VLLM_PLUGINS="emulated_xpu",
            XPUSTACK_OUTCOMES=str(outcomes),
            **pins,
        ),
        timeout=LIMIT,
    )
    crash = ""
    if done.returncode == TIMED_OUT:
        crash = f"killed after {LIMIT:.0f} s"
    elif not outcomes.is_file():
        crash = f"it ended with exit status {done.returncode}"
    if crash:
        return Run(crash=crash, output=done.last_lines(), seconds=done.seconds)
    run = msgspec.json.decode(outcomes.read_bytes(), type=Run)
    return msgspec.structs.replace(run, output=done.last_lines(), seconds=done.seconds)


def _imports(path: Path) -> Iterable[str]:
    """The modules that a file imports, relative ones without their dots."""
    for node in ast.walk(parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.module
            if node.level:
                yield from (alias.name for alias in node.names)


def _entry_points(project: Project) -> str:
    """The plugins that the project registers, as installed metadata has them."""
    path = project.root / "pyproject.toml"
    described = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    groups = described.get("project", {}).get("entry-points", {})
    lines = [f"{key} = {value}" for key, value in groups.get(_ENTRY_POINTS, {}).items()]
    return "\n".join([f"[{_ENTRY_POINTS}]", *lines, ""])
