# SPDX-License-Identifier: Apache-2.0
"""The tool's packages with hashes agree with the lock of everything."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "requirements"


def entries() -> dict[str, tuple[Requirement, list[str]]]:
    text = (FOLDER / "tool.lock").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=", line.strip())
            parsed = Requirement(requirement)
            found[canonicalize_name(parsed.name)] = (parsed, hashes)
    return found


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
    lines = (FOLDER / "tool.txt").read_text().splitlines()
    wanted = {
        canonicalize_name(Requirement(line).name)
        for line in lines
        if line and not line.startswith("#")
    }
    assert wanted <= set(entries())
