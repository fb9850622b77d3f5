# SPDX-License-Identifier: Apache-2.0
"""The lock against the plain package index, for every supported Python.

pip resolves in a dry run from the wheels' metadata alone. It does not use the links and
further indexes of this machine, which may offer what no other machine has. Where the
index cannot be reached, those tests are skipped and say why.
"""

import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
# The sets of tox.ini, with the Pythons that run them.
SHARED, AOT, SITE = "shared", "aot", "site"
CASES = [
    *((SHARED, python) for python in PYTHONS),
    *((AOT, python) for python in ("3.11", "3.12")),
    *((SITE, python) for python in PYTHONS),
]
# The machine may decide how the index is reached, not what else there is.
KEPT = re.compile(r"SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|PIP_(CERT|PROXY)|.*_proxy")
SECONDS = 240


@dataclass(frozen=True)
class Resolution:
    """pip's answer: its output, and its report (None: there is no resolution)."""

    output: str
    report: dict[str, Any] | None

    @property
    def installed(self) -> dict[str, dict[str, Any]]:
        assert self.report is not None, self.output
        return {
            canonicalize_name(item["metadata"]["name"]): item
            for item in self.report["install"]
        }


def pip(*arguments: str) -> subprocess.Popen[str]:
    environment = {n: v for n, v in os.environ.items() if KEPT.fullmatch(n)}
    environment |= {"PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.Popen(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def requirements(name: str) -> list[str]:
    """The arguments with which tox installs a set."""
    if name == AOT:
        # pip evaluates the marker of its file for the Python that runs pip.
        return ["--no-deps", "triton-xpu"]
    if name == SITE:
        return ["--group", "browser"]
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    groups = tox["testenv"]["dependency_groups"].replace(",", " ").split()
    described = project()["project"]["dependencies"]
    return [*described, *(word for group in groups for word in ("--group", group))]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned() -> dict[str, str]:
    pins = {}
    for line in LOCK.read_text().splitlines():
        name, _, version = line.partition("==")
        assert version and canonicalize_name(name) not in pins, line
        pins[canonicalize_name(name)] = version
    return pins


@pytest.fixture(scope="module")
def index() -> None:
    """Skip unless the index answers."""
    asked = pip("--retries=1", "--timeout=10", "index", "versions", "packaging")
    output = asked.communicate(timeout=SECONDS)[0]
    if asked.returncode:
        reason = output.strip().splitlines()[-1:] or ["no output"]
        pytest.skip(f"the package index cannot be asked: {reason[0]}")


@pytest.fixture(scope="module")
def resolutions(
    index: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Resolution]]:
    """pip's answers to all cases, which run at once: each mostly waits."""
    folder = tmp_path_factory.mktemp("resolutions")
    running = {
        (name, python): pip(
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--no-cache-dir",
            "--use-feature=fast-deps",
            "--only-binary=:all:",
            f"--python-version={python}",
            f"--target={folder / 'target'}",
            f"--report={folder / f'{name}-{python}.json'}",
            "--constraint=requirements/constraints.txt",
            *requirements(name),
        )
        for name, python in CASES
    }
    try:
        results = {}
        for (name, python), asked in running.items():
            try:
                output = asked.communicate(timeout=SECONDS)[0]
            except subprocess.TimeoutExpired:
                pytest.skip(f"the package index took more than {SECONDS} s")
            report = folder / f"{name}-{python}.json"
            parsed = None if asked.returncode else json.loads(report.read_bytes())
            results[name, python] = Resolution(output, parsed)
        yield results
    finally:
        for asked in running.values():
            asked.kill()


def test_the_lock_names_one_version_of_each_package_that_is_asked_for() -> None:
    pins = pinned()
    groups = {"the tool": project()["project"]["dependencies"]}
    for group, lines in {**groups, **project()["dependency-groups"]}.items():
        for line in (line for line in lines if isinstance(line, str)):
            asked = Requirement(line)
            # A package of one environment alone may be pinned where it stands.
            exact = str(asked.specifier).startswith("==")
            name = canonicalize_name(asked.name)
            assert name in pins or exact, f"{group}: {line}"


def test_the_hooks_ask_for_what_the_lock_names() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    pins = pinned()
    for hook in hooks["repos"][0]["hooks"]:
        for line in hook["additional_dependencies"]:
            name, _, version = line.partition("==")
            # Two mypys: the hook's own, and the one that the bases' hooks ask for.
            if name != "mypy":
                assert pins.get(canonicalize_name(name), version) == version, line


@pytest.mark.parametrize(("name", "python"), CASES)
def test_the_plain_index_has_all_of_the_lock(
    resolutions: dict[tuple[str, str], Resolution], name: str, python: str
) -> None:
    installed = resolutions[name, python].installed
    pins = pinned()
    # pip drops the zeros at a version's end: 13.0.3 is 13.0.3.0.
    assert {package: pins.get(package) for package in installed} == {
        package: item["metadata"]["version"] for package, item in installed.items()
    }
    if name == AOT:
        return
    # pip evaluates markers for the Python that runs it, not for the requested one.
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    for package, item in installed.items():
        extras = ["", *item.get("requested_extras", ())]
        for line in item["metadata"].get("requires_dist", ()):
            needed = Requirement(line)
            if needed.marker is None or any(
                needed.marker.evaluate({**target, "extra": extra}) for extra in extras
            ):
                version = pins.get(canonicalize_name(needed.name))
                assert version, f"{package} needs {line}"
                assert needed.specifier.contains(version), f"{package} needs {line}"


def test_the_lock_names_nothing_that_no_environment_installs(
    resolutions: dict[tuple[str, str], Resolution],
) -> None:
    needed = {
        name for resolution in resolutions.values() for name in resolution.installed
    }
    assert set(pinned()) == needed
