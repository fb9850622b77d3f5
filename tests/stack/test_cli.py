# SPDX-License-Identifier: Apache-2.0
"""The command line from outside: words, output and exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_stack import TinyStack
from typer.testing import CliRunner, Result

from xpustack import checks, releases
from xpustack.cli import app
from xpustack.project import Project
from xpustack.results import Report

PINNED = list(releases.load(Project.find(Path(__file__).parent)).names)


@pytest.fixture
def call(tiny: TinyStack, monkeypatch: pytest.MonkeyPatch):
    """A function that runs the command line in the small stack."""
    monkeypatch.chdir(tiny.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(tiny.cache.root))

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, words)

    return run


def test_apply_all_and_save_back(call, tmp_path: Path):
    done = call("apply", "--all", "--offline", "--json")
    assert done.exit_code == 0, done.output
    trees = json.loads(done.stdout)["trees"]
    assert [(tree["release"], tree["step"]) for tree in trees] == [
        ("v1.0", "base"),
        ("v1.0", "raise-value"),
        ("v2.0", "base"),
        ("v2.0", "raise-value"),
    ]
    work = tmp_path / "work"
    assert call("apply", "v1.0", "--to", str(work)).exit_code == 0
    done = call("save", str(work), "--dry-run")
    assert (done.exit_code, done.stdout) == (0, "nothing to save\n")


def test_check_prints_its_report_last(call):
    done = call("check", "v1.0", "raise-value", "--offline")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("\n4 passed, 0 failed\n")
    data = json.loads(call("check", "v1.0", "--offline", "--json").stdout)
    assert (data["passed"], data["failed"]) == (4, 0)


@pytest.mark.parametrize(
    ("words", "checked", "whole"),
    [
        ([], PINNED, []),
        (["--tip"], PINNED, PINNED),
        (["--ends"], [PINNED[0], PINNED[-1]], [PINNED[0]]),
        (["v0.22.1", "--ends"], ["v0.22.1"], []),
    ],
    ids=str,
)
def test_which_series_are_checked_and_which_of_them_whole(
    words, checked, whole, real_project, monkeypatch
):
    asked = {}

    def run(project, cache, chosen, **options):
        asked.update(options, chosen=[release.name for release in chosen])
        return Report((), 0.0)

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.chdir(real_project.root)
    done = CliRunner().invoke(app, ["check", *words])
    assert done.exit_code == 0, done.output
    assert (asked["chosen"], list(asked["tips"])) == (checked, whole)


def test_static_and_status(call):
    done = call("check", "--static")
    assert (done.exit_code, done.stdout) == (0, "static: 0 errors\n"), done.output
    assert json.loads(call("check", "--static", "--json").stdout) == []
    data = json.loads(call("status", "--json").stdout)
    assert [(e["release"], e["step"], e["changed"]) for e in data] == [
        ("v1.0", "raise-value", 2),
        ("v2.0", "raise-value", 2),
    ]
    assert "| `raise-value` |" in call("status", "--markdown").stdout
    assert "raise-value" in call("status").stdout


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("check", "v1.1"), 2, "did you mean v1.0?"),
        (("check", "v1.0", "raise-valu"), 2, "did you mean raise-value?"),
        (("apply", "v1.0", "--upto", "rise-value"), 2, "did you mean raise-value?"),
        (("apply",), 2, "name one RELEASE"),
        (("check", "--only", "nothing"), 2, "nothing"),
        (("save", "nowhere"), 2, "was not made by xpustack apply"),
    ],
)
def test_a_wrong_word_is_explained(call, words, code, text):
    done = call(*words)
    assert (done.exit_code, text in done.output) == (code, True), done.output


def test_errors_are_json_when_asked(call):
    done = call("check", "v1.1", "--json")
    assert done.exit_code == 2
    error = json.loads(done.stdout)
    assert (error["error"], error["release"]) == ("UsageError", "v1.1")


def test_outside_a_project(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("status")
    assert done.exit_code == 2
    assert "no releases.toml" in done.output


def test_the_exit_codes_are_documented(call):
    assert "130 interrupted" in " ".join(call("--help").output.split())


def test_the_tool_starts_without_torch(tiny: TinyStack):
    program = "import sys, xpustack.cli; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=tiny.environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n", done.stderr


def test_the_core_imports_neither_typer_nor_rich(tiny: TinyStack):
    core = (
        "build, checks, lint, status, steptest, tree, save, static, pin, results, "
        "ship, verify, memory, export, refresh, refresh_report, watch"
    )
    program = (
        f"import sys; from xpustack import {core};"
        "print({'typer', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=tiny.environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "set()\n", done.stderr
