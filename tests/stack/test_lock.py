# SPDX-License-Identifier: Apache-2.0
"""The lock against the plain package index, for every supported Python.

uv resolves from the wheels' metadata alone, in a tenth of pip's time. It does not use
the links and further indexes of this machine, which may offer what no other machine
has. Where the index cannot be reached, those tests are skipped and say why.
"""

import configparser
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
KEPT = re.compile(r"SSL_CERT_(FILE|DIR)|.*_proxy")
SECONDS = 240
NO_INDEX = "error sending request"
"""What uv says where nothing answers."""


def uv(*arguments: str) -> subprocess.Popen[str]:
    environment = {n: v for n, v in os.environ.items() if KEPT.fullmatch(n)}
    environment |= {"PATH": os.defpath}
    return subprocess.Popen(
        [sys.executable, "-m", "uv", "--no-config", "--quiet", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def requirements(name: str) -> list[str]:
    """The arguments that name what tox installs in a set."""
    if name == AOT:
        return ["--group=aot", "--no-deps"]
    if name == SITE:
        return ["--group=browser"]
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    groups = tox["testenv"]["dependency_groups"].replace(",", " ").split()
    return ["pyproject.toml", *(f"--group={group}" for group in groups)]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(text: str) -> dict[str, str]:
    """The versions in lines such as `name==1.2`, by name."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        name, _, version = line.partition("==")
        name = canonicalize_name(name)
        assert version and name not in pins, line
        pins[name] = version
    return pins


def pinned() -> dict[str, str]:
    return read(LOCK.read_text())


@pytest.fixture(scope="module")
def resolutions() -> Iterator[dict[tuple[str, str], dict[str, str]]]:
    """The versions that uv chooses for all cases, which run at once: each mostly
    waits. Skip unless the index answers."""
    running = {
        (name, python): uv(
            *("pip", "compile", "--no-cache", "--system-certs"),
            *("--only-binary=:all:", "--no-header", "--no-annotate"),
            f"--python-version={python}",
            "--constraints=requirements/constraints.txt",
            *requirements(name),
        )
        for name, python in CASES
    }
    try:
        results, unasked = {}, ""
        for case, asked in running.items():
            try:
                output = asked.communicate(timeout=SECONDS)[0]
            except subprocess.TimeoutExpired:
                unasked = f"the package index took more than {SECONDS} s"
                continue
            if NO_INDEX in output:
                unasked = f"the package index cannot be asked: {output.strip()}"
                continue
            assert asked.returncode == 0, output
            results[case] = read(output)
        # An answer that is wrong counts, whatever the others are.
        if unasked:
            pytest.skip(unasked)
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
    resolutions: dict[tuple[str, str], dict[str, str]], name: str, python: str
) -> None:
    chosen, pins = resolutions[name, python], pinned()
    assert chosen == {package: pins.get(package) for package in chosen}


def test_the_lock_names_nothing_that_no_environment_installs(
    resolutions: dict[tuple[str, str], dict[str, str]],
) -> None:
    assert set(pinned()) == set().union(*resolutions.values())
