# SPDX-License-Identifier: Apache-2.0
"""The tool's packages with hashes agree with the lock of everything."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "requirements"
NO_INDEX = "error sending request"
"""What uv says where nothing answers."""


def entries(
    file: Path = FOLDER / "tool.lock",
) -> dict[str, tuple[Requirement, list[str]]]:
    text = file.read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=", line.strip())
            parsed = Requirement(requirement)
            found[canonicalize_name(parsed.name)] = (parsed, hashes)
    return found


def asked() -> list[Requirement]:
    """What the project asks for."""
    described = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    return [Requirement(line) for line in described["project"]["dependencies"]]


def constraints() -> dict[str, str]:
    lines = (FOLDER / "constraints.txt").read_text().split()
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pairs}


def test_each_package_has_the_locked_version_and_hashes():
    locked = constraints()
    for name, (requirement, hashes) in entries().items():
        assert hashes, name
        if requirement.marker is None or requirement.marker.evaluate():
            assert str(requirement.specifier) == f"=={locked[name]}", name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes)


def test_every_package_that_the_tool_asks_for_is_there():
    wanted = {canonicalize_name(requirement.name) for requirement in asked()}
    assert wanted <= set(entries())


def extras() -> dict[str, set[str]]:
    """The extras that are asked for, by package: those of the project, and of what the
    packages themselves require."""
    found: dict[str, set[str]] = {}
    waiting = asked()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        before = found.get(name)
        found[name] = (before or set()) | requirement.extras
        if found[name] != before:
            waiting += needed(name, found[name])
    return found


def needed(name: str, wanted: set[str]) -> list[Requirement]:
    """What an installed package requires here, with some of its extras."""
    every = (Requirement(text) for text in requires(name) or [])
    return [
        requirement
        for requirement in every
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": e}) for e in wanted | {""})
    ]


def test_whatever_its_packages_require_is_there():
    """By the metadata of the installed packages: tests install them all."""
    locked = entries()
    reached = extras()
    for name, wanted in reached.items():
        assert name in locked, name
        for requirement in needed(name, wanted):
            required = canonicalize_name(requirement.name)
            assert required in locked, f"{name} requires {required}"
            [pin] = locked[required][0].specifier
            versions = requirement.specifier
            assert versions.contains(pin.version, prereleases=True), requirement
    here = {
        name
        for name, (requirement, _) in locked.items()
        if requirement.marker is None or requirement.marker.evaluate()
    }
    assert here == set(reached)


def test_every_extra_that_is_asked_for_is_locked():
    """pip before 23.3 does not take `pydantic==2` for an exact version of the
    `pydantic[email]` that a package requires."""
    locked = entries()
    for name, wanted in extras().items():
        assert locked[name][0].extras == wanted, name
        assert str(locked[name][0].specifier).startswith("=="), name


def test_the_command_in_its_head_makes_the_file(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "requirements")
    shutil.copy(FOLDER.parent / "pyproject.toml", tmp_path)
    file = tmp_path / "requirements/tool.lock"
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    indented = [line.removeprefix("#     ") for line in head if "#     " in line]
    file.write_text("\n".join([*head, ""]))
    keep = re.compile(r"SSL_CERT_(FILE|DIR)|.*_proxy|HOME")
    environment = {n: v for n, v in os.environ.items() if keep.fullmatch(n)}
    programs = str(Path(sys.executable).parent)
    made = subprocess.run(
        ["sh", "-ec", "\n".join(indented[1:])],
        cwd=file.parent,
        env=environment | {"PATH": f"{programs}:{os.defpath}", "UV_NO_CONFIG": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if NO_INDEX in made.stderr:
        pytest.skip(f"the package index cannot be asked: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    assert file.read_text().splitlines()[: len(head)] == head
    # Other systems' packages are not in constraints.txt, and hashes are added later.
    found, expected = (
        {
            str(requirement)
            for requirement, hashes in each.values()
            if hashes and (requirement.marker is None or requirement.marker.evaluate())
        }
        for each in (entries(file), entries())
    )
    assert found == expected


def test_an_environment_is_made_of_it():
    config = configparser.ConfigParser(interpolation=None)
    config.read(FOLDER.parent / "tox.ini")
    assert config["testenv:device"]["deps"] == "-r requirements/tool.lock"
