# SPDX-License-Identifier: Apache-2.0
"""The workflows: their commands are tox environments, their actions are pinned, and
each job has the rights and the time that it needs."""

import configparser
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from xpustack.__main__ import PANELS
from xpustack.base.releases import load
from xpustack.core.project import Project

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
COMMANDS = {command.__name__ for panel in PANELS.values() for command in panel}
TOX = re.compile(r"(?:\.venv/bin/)?tox -e ([a-z0-9-]+)(?: -- .+)?")
PREPARATION = (
    r"apt-get update",
    r"apt-get install --yes --no-install-recommends [a-z0-9+ -]+",
    r"chown --recursive root \.",
    r"python3 -m venv \.venv",
    r"(?:python3|\.venv/bin/python) -m pip install"
    r" -c requirements/constraints\.txt tox",
)
PUBLICATION = (
    # test_published.py runs these.
    r"for folder in dist/ dist/v\*/; do cp .+; done",
    r"cd dist",
    r"sha256sum v\*/\* > SHA256SUMS",
    r"for name in v\*/; do tar .+ \| gzip .+; done",
    r"gh release create .+",
    r"podman (?:build|login|push) .+",
)
"""What publishes is no check that anybody runs at home, so it is no environment."""


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        for name, job in workflow["jobs"].items():
            yield path.stem, name, job


def commands(job: dict[str, Any]) -> Iterator[str]:
    """The lines of a job's scripts, for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                for key, value in zip(matrix, values, strict=True):
                    line = line.replace(f"${{{{ matrix.{key} }}}}", value)
                yield line


def environments() -> set[str]:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    sections = (name.partition("testenv:") for name in config.sections())
    return {name for _, found, name in sections if found}


JOBS = list(jobs())
IDS = [f"{workflow}-{name}" for workflow, name, _ in JOBS]


@pytest.mark.parametrize(("workflow", "name", "job"), JOBS, ids=IDS)
def test_each_command_is_an_environment_that_exists(
    workflow: str, name: str, job: dict[str, Any]
):
    known = environments()
    for command in commands(job):
        tox = TOX.fullmatch(command)
        if tox is not None:
            assert tox[1] in known, command
            continue
        allowed = PREPARATION + (PUBLICATION if workflow == "release" else ())
        assert any(re.fullmatch(form, command) for form in allowed), command


def test_a_dry_run_of_every_command():
    """tox itself says what each command of a workflow would run. Shown with `-s`."""
    wanted = {
        (match[1], tuple(shlex.split(command.partition(" -- ")[2])))
        for _, _, job in JOBS
        for command in commands(job)
        if (match := TOX.fullmatch(command))
    }
    assert {name for name, _ in wanted} >= {"lowered", "watch", "apply-and-test"}
    runs = {}
    for name, rest in sorted(wanted):
        words = [sys.executable, "-m", "tox", "config", "-e", name, "-k", "commands"]
        words += ["--", *rest] if rest else []
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"[testenv:{name}]" in done.stdout
        lines = done.stdout.partition("commands =")[2].splitlines()
        runs[name, rest] = [line.strip() for line in lines if line.strip()]
        assert runs[name, rest], done.stdout
        for line in runs[name, rest]:
            program, *words = shlex.split(line)
            assert program in ("python", "pytest", "pre-commit"), line
            if words[:2] == ["-m", "xpustack"]:
                assert words[2] in COMMANDS, line
            for word in words:
                if word.startswith(("tests/", "@tests/")):
                    assert (ROOT / word.lstrip("@")).exists(), line
    for (name, rest), lines in runs.items():
        text = f"tox -e {name}" + (f" -- {shlex.join(rest)}" if rest else "")
        print(f"{text}: {'; '.join(lines)}")


def test_every_night_runs_what_a_pull_request_does_not():
    run = {
        match[1]
        for workflow, _, job in JOBS
        if workflow == "nightly"
        for command in commands(job)
        if (match := TOX.fullmatch(command))
    }
    assert run == {"apply-and-test", "lowered", "site", "watch"}


def test_a_pull_request_runs_what_tox_runs():
    run = {
        match[1]
        for workflow, _, job in JOBS
        if workflow == "pull-request"
        for command in commands(job)
        if (match := TOX.fullmatch(command))
    }
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    assert run == {name.strip() for name in config["tox"]["env_list"].split(",")}


@pytest.mark.parametrize(("workflow", "name", "job"), JOBS, ids=IDS)
def test_each_job_has_few_rights_and_little_time(
    workflow: str, name: str, job: dict[str, Any]
):
    assert 0 < job["timeout-minutes"] <= 180
    rights = job["permissions"]
    writes = {right for right, kind in rights.items() if kind == "write"}
    # What runs code of a pull request or of an archive can write nothing.
    if any(TOX.fullmatch(command) for command in commands(job)):
        assert rights == {"contents": "read"}
    if writes:
        assert workflow == "release" and "environment" in job


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_action_is_pinned_by_hash_with_its_version(path: Path):
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {}
    uses = re.findall(r"uses: *(.*)", text)
    assert uses
    for line in uses:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    hashes = {
        (line.partition("@")[0], line.partition("@")[2])
        for workflow in WORKFLOWS
        for line in re.findall(r"uses: *(.*)", workflow.read_text())
    }
    assert len({name for name, _ in hashes}) == len(hashes), "one version of each"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_expression_stands_in_a_script(path: Path):
    """GitHub pastes an expression into the script as text; the matrix is our own."""
    for _, job in yaml.safe_load(path.read_text())["jobs"].items():
        for step in job["steps"]:
            found = re.findall(r"\$\{\{ *([^}]*?) *\}\}", step.get("run", ""))
            assert all(name.startswith("matrix.") for name in found), step


def test_the_device_runs_no_code_of_a_pull_request():
    workflow = yaml.safe_load((ROOT / ".github/workflows/device.yml").read_text())
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}
    for path in WORKFLOWS:
        text = path.read_text()
        assert "pull_request_target" not in text
        assert path.stem == "device" or "self-hosted" not in text


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ROOT / "CITATION.cff"],
    ids=lambda path: path.name,
)
def test_forms_and_citation_are_yaml_that_the_forge_reads(path: Path):
    data = yaml.safe_load(path.read_text())
    if path.suffix == ".cff":
        assert {"cff-version", "message", "title", "authors"} <= set(data)
        tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert (data["version"], data["license"]) == (tool["version"], tool["license"])
    elif path.stem != "config":
        assert {"name", "description", "body"} <= set(data)
        parts = [part for part in data["body"] if part["type"] != "markdown"]
        ids = [part["id"] for part in parts]
        assert len(set(ids)) == len(ids)
        assert all(part["attributes"]["label"] for part in parts)


def test_what_is_published_is_made_without_a_cache():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "actions/cache" not in text


def test_a_release_is_published_after_what_tox_runs():
    """And after lint and build; `aot` is what the pull requests before it ran."""
    release = {name: job for workflow, name, job in JOBS if workflow == "release"}
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    wanted = {name.strip() for name in config["tox"]["env_list"].split(",")} - {"aot"}

    def before(name: str) -> set[str]:
        needs = release[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(before, direct))

    for name, job in release.items():
        if "write" not in job["permissions"].values():
            continue
        run = {
            match[1]
            for other in before(name)
            for command in commands(release[other])
            if (match := TOX.fullmatch(command))
        }
        assert run >= wanted | {"build"}, name
        assert name == "publish" or "publish" in before(name)


def test_each_run_saves_its_cache_and_takes_that_of_an_earlier_run():
    """actions/cache saves nothing where the key is found, so no key may come twice."""
    steps = [
        (name, job, step["with"])
        for _, name, job in JOBS
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/cache@")
    ]
    assert {name for name, _, _ in steps} >= {"tox", "aot", "matrix", "lowered"}
    for name, job, cache in steps:
        head, _, last = cache["key"].rpartition("-")
        assert last == "${{ github.run_id }}", name
        first, *others = cache["restore-keys"].splitlines()
        assert first == f"{head}-"
        assert all(head.startswith(other) for other in others)
        home = job.get("env", {}).get("XDG_CACHE_HOME", "~/.cache")
        assert ("container" in job) == (home != "~/.cache")
        places = set(cache["path"].split())
        assert places >= {f"{home}/pip", f"{home}/xpustack"}
        assert all(place.startswith(f"{home}/") for place in places)
        # In a container the checkout is another user's, whose files git does not list.
        assert ("container" in job) == ("chown --recursive root ." in commands(job))
    [lint] = [cache for name, _, cache in steps if name == "tox"]
    assert "~/.cache/pre-commit" in lint["path"].split()


def test_the_image_is_of_the_newest_release(real_project: Project):
    [job] = [job for _, name, job in JOBS if name == "image"]
    assert job["strategy"]["matrix"]["release"] == [load(real_project).names[-1]]
