# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of what steps touch, run before and after them on one platform."""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

import msgspec

from stack.base.releases import Release
from stack.base.store import Store
from stack.builds.installed import Build
from stack.core.cache import atomic_file
from stack.core.errors import CheckFailed, UsageError, command
from stack.core.files import imports, parse_python
from stack.core.process import Runner, clean_environment
from stack.core.rows import csv_text, read_rows
from stack.series.tree import Tree
from stack.steptest.environment import NO_DEVICE, NOT_COMPILED, vllm_variables
from stack.steptest.material import Support
from stack.steptest.step_test import CPU, XPU, Platform

PROGRAM = Path(__file__).with_name("programs") / "run_files.py"
DATA = "docs/data/upstream_tests.csv"
BOTH = ("before", "after")
CUDA = Platform("plain_cuda", "standins.emulated_xpu.cuda_pytest_plugin")
_AHEAD = ("vllm.config", "vllm.model_executor.models.registry")
LATE = "it was killed at its limit"
_NAMED = "vllm."
_NO_CALL = ("skipped", "error")
"""Outcomes of a test whose body was not called."""
_SHOWN = 5
"""The most reasons why files did not run that an error shows."""
_KEY = ("release", "step", "platform", "file")

Device = Literal["cpu", "emulated", "cuda"]
"""A platform of vLLM."""
PLATFORMS: Mapping[Device, Platform] = {"cpu": CPU, "emulated": XPU, "cuda": CUDA}


PACKAGES = {
    "anthropic": "anthropic",
    "docstring_parser": "docstring_parser",
    "httpx": "httpx",
    "orjson": "orjson",
    "pydantic-extra-types": "pydantic_extra_types",
    "pytest-asyncio": "pytest_asyncio",
    "python-multipart": "python_multipart",
    "tblib": "tblib",
    "tiktoken": "tiktoken",
    "uvicorn": "uvicorn",
    "watchfiles": "watchfiles",
}
"""What vLLM's tests import beside vLLM's own needs, with the module's name."""


class FileRun(msgspec.Struct, frozen=True):
    """What the program writes of one file."""

    tests: dict[str, str]
    problem: str
    seconds: float
    reasons: dict[str, str] = {}


@dataclass(frozen=True)
class Compared:
    """A file on one platform, before the steps and after them.

    `changed` lists the tests whose outcome differs, each with both. Of a file that was
    killed at its limit it compares the tests that ended both times.
    """

    file: str
    before: FileRun
    after: FileRun

    @property
    def differing(self) -> dict[str, tuple[str, str]]:
        """The outcomes before and after of each test where they differ, `-` where it
        did not run."""
        before, after = self.before.tests, self.after.tests
        late = LATE in (self.before.problem, self.after.problem)
        names = before.keys() & after.keys() if late else before.keys() | after.keys()
        both = {name: (before.get(name, "-"), after.get(name, "-")) for name in names}
        return {name: both[name] for name in sorted(both) if len({*both[name]}) > 1}

    @property
    def changed(self) -> tuple[str, ...]:
        found = self.differing.items()
        return tuple(f"{name}: {a} → {b}" for name, (a, b) in found)

    @property
    def ran(self) -> bool:
        """Whether a test of it ran, before the steps or after them."""
        both = (*self.before.tests.values(), *self.after.tests.values())
        return any(outcome not in _NO_CALL for outcome in both)

    @property
    def not_run(self) -> str:
        """Why there are no outcomes, or not all; empty where there are."""
        return self.after.problem or self.before.problem

    def count(self, which: str, *outcomes: str) -> int:
        run: FileRun = getattr(self, which)
        return sum(outcome in outcomes for outcome in run.tests.values())


def require_packages(
    release: Release, packages: Path | None, asked: str = "upstream-tests"
) -> None:
    """Require what vLLM's tests import beside vLLM's own needs.

    Args:
        asked: the command that runs them.
        packages: a folder of it; None for what is installed.

    Raises:
        UsageError: something is in neither place.
    """
    places = [*([] if packages is None else [str(packages)]), *sys.path]
    missing = [
        package
        for package, module in PACKAGES.items()
        if PathFinder.find_spec(module, places) is None
    ]
    if missing:
        folder = "DIR" if packages is None else packages
        install = ("pip", "install", "--target", folder, "--no-deps", *missing)
        again = (asked, release.name, "--packages", folder)
        raise UsageError(
            f"vLLM's tests import what is not there: {', '.join(missing)}",
            release=release.name,
            path=packages,
            hint=f"{command('python3', '-m', *install)}, then"
            f" {command('xpustack', *again)}",
        )


def require_named(
    files: Sequence[str], modules: Iterable[str], release: Release, step: str | None
) -> None:
    """Require a file to run.

    Raises:
        UsageError: there is none.
    """
    if files:
        return
    changed = ", ".join(sorted(modules)) or "no module that the tree before has"
    raise UsageError(
        f"no file of vLLM's tests names what the {'step' if step else 'series'}"
        " changes: nothing to run",
        release=release.name,
        step=step,
        detail=[f"it changes {changed}"],
        hint=f"xpustack check {command(release.name, *filter(None, [step]))}"
        " runs the tests of the steps themselves",
    )


def nothing_ran(found: Sequence[Compared], release: Release) -> CheckFailed | None:
    """The error where no test ran, before the steps or after them; None where one did.
    Then nothing is known of the steps."""
    if any(one.ran for one in found):
        return None
    otherwise = "its tests were skipped, or failed in their set-up"
    reasons = Counter(one.not_run or otherwise for one in found)
    return CheckFailed(
        "no test ran, neither before nor after",
        release=release.name,
        detail=[f"{n} files: {why}" for why, n in reasons.most_common(_SHOWN)]
        or ["no file has outcomes of both"],
        hint=f"xpustack upstream-tests {release.name} --to DIR keeps what pytest said"
        " in DIR",
    )


def touched_modules(store: Store, before: Tree, after: Tree) -> set[str]:
    """The modules of vLLM that differ and that the tree before has."""
    return {
        change.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for change in store.git.changes(before.tree_id, after.tree_id)
        if change.old is not None and change.path.startswith("vllm/")
        if change.path.endswith(".py")
    }


def naming(tree: Path, modules: Iterable[str]) -> list[str]:
    """The files of vLLM's tests that import one of the modules, or name one in a
    string."""
    wanted = set(modules)
    return sorted(
        path.relative_to(tree).as_posix()
        for path in tree.glob("tests/**/test_*.py")
        if wanted & _names(path.read_bytes(), str(path))
    )


def _names(source: bytes, path: str) -> set[str]:
    names = set(imports(source, path))
    for node in ast.walk(parse_python(source, path)):
        if isinstance(node, ast.Constant) and str(node.value).startswith(_NAMED):
            # What a patch or a subprocess names: a module, or something in one.
            names |= {str(node.value), str(node.value).rpartition(".")[0]}
    return names


def lay_out(
    folder: Path, tree: Path, builds: Sequence[Build], files: Sequence[str]
) -> None:
    """Write what a run needs: both installs, vLLM's tests and the list of files.

    Args:
        tree: the files of the tree before.
        builds: of the trees before and after.
    """
    shutil.copytree(tree / "tests", folder / "run/tests", symlinks=True)
    shutil.copy(tree / "pyproject.toml", folder / "run")
    for name, build in zip(BOTH, builds, strict=True):
        (folder / name).symlink_to(build.installed)
    (folder / "files.json").write_bytes(msgspec.json.encode(files))


def run(
    runner: Runner,
    support: Support,
    release: Release,
    folder: Path,
    device: Device,
    jobs: int,
    packages: Path | None = None,
    prepare: bool = False,
    seconds: int = 120,
) -> None:
    """Run the program on both installs in `folder`, as `lay_out` left it.

    Args:
        jobs: files at a time.
        seconds: the limit of each.
        packages: a folder of what vLLM's tests import beside vLLM's own needs.
        prepare: only write what the program needs, and `commands.sh`, which runs it on
            another machine.

    Raises:
        CheckFailed: the program ends with an error.
    """
    shutil.copy(PROGRAM, folder / "program.py")
    (folder / "plugins").mkdir()
    support.lay_out(folder / "plugins")
    commands = []
    for name in BOTH:
        (folder / f"{device}-{name}").mkdir()
        environment = _environment(folder, release, device, name)
        if packages is not None:
            environment["PYTHONPATH"] += f":{packages}"
        command = _command(device, name, jobs, seconds)
        commands.append((environment, command, folder / f"{device}-{name}/log.txt"))
    if prepare:
        lines = []
        for environment, command, _ in commands:
            words = [f"{name}={value}" for name, value in environment.items()]
            words += ["python3", *command]
            lines.append(f"cd {folder}/run && env {' '.join(words)}\n")
        script = "".join(lines).replace(str(folder), "$D")
        (folder / "commands.sh").write_text(script)
        return
    for environment, command, place in commands:
        with open(place, "w", encoding="utf-8") as log:
            process = runner.start(
                [sys.executable, *command],
                cwd=folder / "run",
                env=clean_environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            status = process.wait()
        if status:
            tail = place.read_text("utf-8").splitlines()[-20:]
            raise CheckFailed(f"{PROGRAM.name} ended with {status}", detail=tail)


def _environment(
    folder: Path, release: Release, device: Device, name: str
) -> dict[str, str]:
    path = [folder / name, folder / "plugins"]
    variables = vllm_variables(
        release.xpu_kernels.version,
        PLATFORMS[device].entry_point,
        folder / f"{device}-{name}",
        path,
    )
    variables |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if device == "cuda":
        return variables
    return {**variables, **NO_DEVICE, **NOT_COMPILED}


def _command(device: Device, name: str, jobs: int, seconds: int) -> list[str]:
    """The program's words; it runs in the folder `run`."""
    plugin = PLATFORMS[device].plugin
    ahead = (plugin, *_AHEAD) if device != "cuda" else ("torch",)
    return [
        *("../program.py", "../files.json", f"../{device}-{name}.json"),
        *("--jobs", str(jobs), "--seconds", str(seconds)),
        *(word for module in ahead for word in ("--ahead", module)),
        *("--", "-p", plugin, "-p", "pytest_asyncio.plugin"),
    ]


def compared(folder: Path, device: str) -> list[Compared]:
    """The outcomes by file. A run that was ended early lacks the last files.

    Raises:
        UsageError: no run, or one that was killed while it wrote, left its results.
    """
    before, after = (_read(folder / f"{device}-{name}.json") for name in BOTH)
    both = sorted(before.keys() & after.keys())
    return [Compared(file, before[file], after[file]) for file in both]


def _read(file: Path) -> dict[str, FileRun]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, FileRun])
    except (FileNotFoundError, msgspec.DecodeError):
        raise UsageError(
            "no run on that platform left its results here",
            path=file,
            hint="run the commands.sh that --prepare wrote to the folder",
        ) from None


def rows_of(
    found: Iterable[Compared], release: Release, step: str | None, device: Device
) -> list[dict[str, object]]:
    """One row for each file, as `DATA` has them; without a step those of the series."""
    return [
        {
            "release": release.name,
            "step": step or "all",
            "platform": device,
            "file": one.file,
            "passed_before": one.count("before", "passed"),
            "passed_after": one.count("after", "passed"),
            "failed_before": one.count("before", "failed", "error"),
            "failed_after": one.count("after", "failed", "error"),
            "skipped_after": one.count("after", "skipped"),
            "changed": "; ".join(one.changed),
            "not_run": one.not_run,
        }
        for one in found
    ]


def write_rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows to a file, whose rows of other files, platforms, steps and releases
    stay."""
    new = {tuple(row[key] for key in _KEY) for row in rows}
    kept = [
        row for row in read_rows(file) if tuple(row[key] for key in _KEY) not in new
    ]
    with atomic_file(file) as out:
        out.write(csv_text([*kept, *rows]).encode())
