# SPDX-License-Identifier: Apache-2.0
"""The command line from outside: words, output and exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from calls import Call, calling
from command_line import invoke
from cyclopts import Parameter
from tiny_stack import TinyStack

from stack.base import releases
from stack.checks import run as checks
from stack.core import process
from stack.core.errors import in_tox, meant
from stack.core.project import Project
from stack.series.result import Report
from stack.terminal.console import plain_number
from xpustack.__main__ import PANELS
from xpustack.commands import cache

ENVELOPE = {"schema", "command", "ok", "exit_code", "data", "errors"}
PLAN = ("plan", "v1.0", "--model", "flash", "--device", "b60")
PINNED = list(releases.load(Project.find(Path(__file__).parent)).names)


@pytest.fixture
def call(tiny: TinyStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs the command line in the small stack."""
    return calling(tiny, monkeypatch)


def test_apply_all_and_save_back(call, tmp_path: Path):
    done = call("apply", "--all", "--offline", "--json")
    assert done.exit_code == 0, done.output
    trees = json.loads(done.stdout)["data"]["trees"]
    assert [(tree["release"], tree["step"]) for tree in trees] == [
        ("v1.0", "base"),
        ("v1.0", "raise-value"),
        ("v2.0", "base"),
        ("v2.0", "raise-value"),
    ]
    work = tmp_path / "work"
    said = call("apply", "v1.0", "--to", str(work)).stdout.splitlines()
    assert said == [
        "v1.0: 1 steps on branch series, each with a tag step/<slug>",
        f"  next: commit; xpustack save {work}",
    ]
    done = call("save", str(work), "--dry-run")
    assert (done.exit_code, done.stdout) == (0, "nothing to save\n")


def test_check_prints_its_report_last(call):
    done = call("check", "v1.0", "raise-value", "--offline")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("\n4 passed, 0 failed\n")
    data = json.loads(call("check", "v1.0", "--offline", "--json").stdout)["data"]
    assert (data["passed"], data["failed"]) == (4, 0)


@pytest.mark.parametrize("words", [("apply", "v1.0"), ("check", "v1.0"), ("check",)])
def test_a_missing_archive_has_one_exit_code(call, tmp_path, monkeypatch, words):
    monkeypatch.setenv("XPUSTACK_CACHE", str(tmp_path / "empty"))
    done = call(*words, "--offline")
    assert done.exit_code == 3, done.output


@pytest.mark.parametrize(
    ("words", "checked", "whole", "quick"),
    [
        ([], PINNED, [], False),
        (["--tip"], PINNED, PINNED, False),
        (["--quick"], PINNED, PINNED[:-1], True),
        (["v0.22.1", "--quick"], ["v0.22.1"], ["v0.22.1"], True),
        ([PINNED[-1], "--quick"], [PINNED[-1]], [], True),
    ],
    ids=str,
)
def test_which_series_are_checked_and_which_of_them_whole(
    words, checked, whole, quick, real_project, monkeypatch
):
    asked = {}

    def run(project, cache, chosen, **options):
        asked.update(options, chosen=[release.name for release in chosen])
        return Report((), 0.0)

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.chdir(real_project.root)
    done = invoke("check", *words)
    assert done.exit_code == 0, done.output
    assert (asked["chosen"], list(asked["tips"])) == (checked, whole)
    assert asked["quick"] is quick


def test_static_and_status(call):
    done = call("check", "--static")
    *notes, last = done.stdout.splitlines()
    assert (done.exit_code, last) == (0, "static: 0 errors"), done.output
    assert all("no digest recorded" in note for note in notes)
    assert json.loads(call("check", "--static", "--json").stdout)["data"] == []
    data = json.loads(call("status", "--json").stdout)["data"]
    assert [(e["release"], e["step"], e["changed"]) for e in data] == [
        ("v1.0", "raise-value", 2),
        ("v2.0", "raise-value", 2),
    ]
    assert "raise-value" in call("status").stdout


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("check", "v1.1"), 2, "did you mean v1.0?"),
        (("check", "v1.0", "raise-valu"), 2, "did you mean raise-value?"),
        (("check", "v1.1", "--static"), 2, "did you mean v1.0?"),
        (("build", "v1"), 2, "next: xpustack build v1.0\n"),
        (("check", "1", "raise-value"), 2, "next: xpustack check v1.0 raise-value\n"),
        (("check", "v1.0", "raise-valu"), 2, "next: xpustack check v1.0 raise-value\n"),
        (("-C", ".", "build", "v1"), 2, "next: xpustack -C . build v1.0\n"),
        (("build", "v1.7"), 2, "next: xpustack pin 1.7\n"),
        (("check", "v1.0", "raise-valu", "--static"), 2, "did you mean raise-value?"),
        (("apply", "v1.0", "--upto", "rise-value"), 2, "did you mean raise-value?"),
        (("apply",), 2, "name one RELEASE"),
        (("check", "--only", "nothing"), 2, "nothing"),
        (("save", "nowhere"), 2, "was not made by xpustack apply"),
        (("device", "--minutes", "0"), 2, "Must be >= 1"),
        (("device", "--python", "none"), 2, "next: xpustack device --python PYTHON"),
        (("check", "-j", "1_6"), 2, '"1_6" is not a whole number'),
        ((*PLAN, "--count", "1_6"), 2, '"1_6" is not a whole number'),
        ((*PLAN, "--count", "sixteen"), 2, '"sixteen" is not a whole number'),
        ((*PLAN, "--count", "1.5"), 2, '"1.5" is not a whole number'),
        ((*PLAN, "--count", "9" * 5000), 2, '9..." is not a whole number'),
        (("cache", "gc", "--days", "soon"), 2, '"soon" is not a number'),
        (("cache", "gc", "--days", "nan"), 2, '"nan" is not a number'),
        (("device", "--minutes", "inf"), 2, '"inf" is not a number'),
        (("cache", "gc", "--days", "1_0"), 2, '"1_0" is not a number'),
        (("check", "--release", "v1.0"), 2, "Unknown option: --release"),
        (("save",), 2, "parameter DIRECTORY requires"),
        (("refresh", "v1.0", "--drop", "a", "b"), 2, "no place for 'b': an option"),
        (("-C", "/nowhere", "status"), 2, "next: xpustack -C DIR status"),
        (("ingest", "none"), 2, "next: ls .device/*/report/device-report.tar.gz"),
        (("verify", "/etc/passwd"), 2, "next: xpustack build RELEASE"),
        (("upstream-tests", "v1.0", "--prepare"), 2, "v1.0 --prepare --to DIR"),
        (("nothing",), 2, "Available commands: "),
    ],
)
def test_a_wrong_word_is_explained(call, words, code, text):
    done = call(*words)
    assert (done.exit_code, text in done.output) == (code, True), done.output


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("build", "v1.0", "--offline"), "tox -e build -- v1.0 --offline"),
        (("check", "v1.0"), "tox -e apply-and-test -- v1.0"),
        (
            ("-C", ".", "build", "v1.0", "--offline"),
            "cd . && tox -e build -- v1.0 --off",
        ),
    ],
)
def test_without_torch_the_same_command_in_tox_is_next(
    tiny: TinyStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words, hint: str
):
    """As where the tool alone is installed, from its lock."""
    monkeypatch.setitem(sys.modules, "torch", None)
    stack = tiny.copy(tmp_path)
    for built in (stack.cache.builds, stack.cache.results):
        shutil.rmtree(built, ignore_errors=True)
    done = calling(stack, monkeypatch)(*words)
    assert done.exit_code == 5, done.output
    assert "torch is not installed" in done.output
    assert f"  next: {hint}" in done.stderr


def test_a_python_without_the_tools_packages_names_the_command_that_has_them():
    """As `python3 -m xpustack` of whoever made no environment yet."""
    words = [sys.executable, "-S", "-m", "xpustack", "status"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == 5
    assert b" has no cyclopts\n  next: the same command of bin/" in done.stderr


def test_a_command_of_no_environment_is_run_in_that_of_builds():
    assert in_tox(["plan", "v1.0", "--model", "my model"]) == (
        "bin/xpustack plan v1.0 --model 'my model'"
    )


def test_a_word_that_is_said_twice_is_not_guessed():
    assert meant("1", "v1.0")(["check", "1", "-j", "1"]) is None


def test_every_number_of_the_command_line_is_read_by_us():
    """Python's own words for a wrong number name its functions."""
    numbers = 0
    for command in [one for of in PANELS.values() for one in of] + [cache.gc]:
        for name, hint in get_type_hints(command, include_extras=True).items():
            if int not in (found := _plain(hint)) and float not in found:
                continue
            numbers += 1
            converters = [one.converter for one in _parameters(hint)]
            assert plain_number in converters, (command.__name__, name)
    assert numbers > 8


def _plain(hint):
    """The types of an annotation, without what it says of them."""
    return [hint] + [one for part in get_args(hint) for one in _plain(part)]


def _parameters(hint):
    return [one for one in _plain(hint) if isinstance(one, Parameter)]


def test_a_table_without_rows_is_not_printed(call):
    assert call("apply", "v1.0", "--upto", "nosuch").stdout == ""


def run(output: int | None) -> subprocess.CompletedProcess[str]:
    """The command line's help, written to a file descriptor."""
    words = [sys.executable, "-m", "xpustack", "--help"]
    errors = subprocess.PIPE
    return subprocess.run(words, stdout=output, stderr=errors, text=True, check=False)


def test_nobody_reads_the_output():
    reads, writes = os.pipe()
    os.close(reads)
    done = run(writes)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_output_cannot_be_written():
    full = os.open("/dev/full", os.O_WRONLY)
    done = run(full)
    os.close(full)
    assert done.returncode == 5
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full", "2</dev/null"])
def test_nobody_can_be_told_what_is_wrong(errors: str, tiny: TinyStack):
    line = f"{sys.executable} -m xpustack check none {errors}"
    done = subprocess.run(line, shell=True, env=tiny.environment, cwd=tiny.project.root)
    assert done.returncode == 2


@pytest.mark.parametrize("words", [("cache",), ("--help",), ("check", "-h"), ()])
def test_help_is_no_document(call, words: tuple[str, ...]):
    done = call(*words, "--json")
    (error,) = json.loads(done.stdout)["errors"]
    assert (done.exit_code, error["exit_code"]) == (2, 2)
    assert error["next"].startswith("xpustack ") and "--help" in error["next"]


def test_static_with_a_step_judges_that_step(three_steps, tmp_path, monkeypatch):
    stack = three_steps.copy(tmp_path)
    patch = stack.patch("second")
    patch.write_text(patch.read_text().replace("Removal: when upstream has it\n", ""))
    monkeypatch.chdir(stack.project.root)
    words = ["check", "v1.0"]
    done = invoke(*words, "second", "--static")
    assert (done.exit_code, "Removal is missing" in done.stdout) == (4, True)
    done = invoke(*words, "first", "--static")
    assert (done.exit_code, done.stdout) == (0, "static: 0 errors\n"), done.stdout
    done = invoke(*words, "fist", "--static")
    assert (done.exit_code, "did you mean first?" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "command", "code", "error"),
    [
        (("check", "v1.1"), "check", 2, "UsageError"),
        (("save", "nowhere"), "save", 2, "UsageError"),
        (("apply", "v1.0", "--upto", "none"), "apply", 2, "UsageError"),
        (("check", "--only", "nothing"), "check", 2, "UsageError"),
        (("check", "--jobs", "0"), "check", 2, "UsageError"),
        (("cache", "nothing"), "cache", 2, "UsageError"),
        (("nothing",), "", 2, "UsageError"),
        (("-C", "nowhere", "status"), "status", 2, "UsageError"),
    ],
)
def test_a_failure_is_one_envelope(call, words, command, code, error):
    done = call(*words, "--json")
    document = json.loads(done.stdout)
    assert set(document) == ENVELOPE
    assert (document["schema"], document["ok"]) == (1, False)
    assert (document["command"], document["exit_code"]) == (command, code)
    assert done.exit_code == code
    assert [entry["error"] for entry in document["errors"]] == [error]


def test_a_fault_of_the_tool_is_neither_a_failed_check_nor_a_bare_traceback(
    call, monkeypatch
):
    monkeypatch.setattr(checks, "run", None)
    done = call("check", "--json", "--offline")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"]) == (70, 70)
    assert [entry["error"] for entry in document["errors"]] == ["InternalError"]
    assert "Traceback" in document["errors"][0]["detail"][0]


def test_every_command_wraps_its_data(call, tmp_path):
    answers = {
        ("status",): list,
        ("check", "--static"): list,
        ("apply", "v1.0", "--offline"): dict,
        ("cache", "info"): dict,
        ("cache", "gc"): dict,
    }
    for words, kind in answers.items():
        document = json.loads(call(*words, "--json").stdout)
        assert (document["ok"], document["exit_code"]) == (True, 0), document
        assert document["command"] == " ".join(
            word for word in words if word not in ("v1.0",) and word[0] != "-"
        )
        assert isinstance(document["data"], kind)


def test_version_and_help(call):
    assert re.fullmatch(
        r"xpustack \d+\.\d+\.\d+( \([0-9a-f]{12}(, changed)?\))?\n",
        call("--version").stdout,
    )
    assert call("-h").stdout == call("--help").stdout
    assert call("check", "-h").stdout == call("check", "--help").stdout
    assert call("cache", "gc", "-h").exit_code == 0
    text = call("-h").stdout
    panels = ("For the deployer", "For the upstream contributor", "For the maintainer")
    places = [text.index(panel) for panel in panels]
    assert places == sorted(places)
    assert places[0] < text.index(" verify ") < places[1] < text.index(" save ")


def test_a_command_runs_as_if_started_elsewhere(call, tiny: TinyStack, tmp_path):
    os.chdir(tmp_path)
    assert call("status").exit_code == 2
    done = call("-C", str(tiny.project.root), "status", "--json")
    assert (done.exit_code, Path.cwd()) == (0, tiny.project.root), done.output


def test_jobs_are_one_more_than_the_cpus_that_the_process_may_use(call, monkeypatch):
    asked = {}

    def run(project, cache, chosen, **options):
        asked.update(options)
        return Report((), 0.0)

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))
    monkeypatch.setattr(process, "_limits", lambda root: iter([5.5]))
    assert call("check").exit_code == 0
    assert asked["jobs"] == 6


@pytest.mark.parametrize(
    ("inner", "outer", "limits"),
    [
        ("200000 100000", "max 100000", [2.0]),
        ("max 100000", "150000 100000", [1.5]),
        ("nonsense", None, []),
    ],
)
def test_limits_of_control_groups(tmp_path, inner, outer, limits):
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/other\n0::/slice/unit\n")
    unit = tmp_path / "root" / "slice" / "unit"
    unit.mkdir(parents=True)
    (unit / "cpu.max").write_text(inner)
    if outer:
        (unit.parent / "cpu.max").write_text(outer)
    assert list(process._limits(tmp_path / "root", own)) == limits
    assert list(process._limits(tmp_path / "root", tmp_path / "none")) == []


def test_outside_a_project(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("status")
    assert done.exit_code == 2
    assert "no releases.toml" in done.output


def test_the_exit_codes_are_documented(call):
    assert "130 interrupted" in " ".join(call("--help").output.split())


def printed(program: str, stack: TinyStack) -> str:
    """What a Python program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=stack.environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


def test_the_tool_starts_without_torch(tiny: TinyStack):
    program = "import sys, xpustack.__main__; print('torch' in sys.modules)"
    assert printed(program, tiny) == "False\n"


def test_the_core_imports_neither_cyclopts_nor_rich(tiny: TinyStack):
    program = """
import importlib, pkgutil, sys
import xpustack
for package in pkgutil.iter_modules(xpustack.__path__, "xpustack."):
    if package.ispkg and package.name not in ("xpustack.commands", "stack.terminal"):
        home = importlib.import_module(package.name)
        for module in pkgutil.iter_modules(home.__path__, package.name + "."):
            if not module.name.endswith("_program"):
                importlib.import_module(module.name)
print({"cyclopts", "rich"} & set(sys.modules))
"""
    assert printed(program, tiny) == "set()\n"
