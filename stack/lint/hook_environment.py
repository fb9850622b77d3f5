# SPDX-License-Identifier: Apache-2.0
"""A virtual environment with the packages that a hook asks for, and no others.

pre-commit makes one by pip for each hook. This one links to packages that are
installed here, so it needs no network and takes a fraction of a second.
"""

import importlib.metadata
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_SCRIPT = """\
#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


def make_hook_environment(folder: Path, requirements: Iterable[str]) -> Path:
    """Make the environment in the new directory `folder`; return its programs' folder.

    What is not installed here is left out.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    names = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", names))
    programs = Path(sysconfig.get_path("scripts", "venv", names))
    for distribution in _with_dependencies(requirements):
        files = distribution.files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(distribution.locate_file(top)))
        for entry in distribution.entry_points.select(group="console_scripts"):
            script = programs / entry.name
            script.write_text(
                _SCRIPT.format(
                    python=programs / "python", module=entry.module, function=entry.attr
                ),
                encoding="utf-8",
            )
            script.chmod(0o755)
    return programs


def _with_dependencies(
    requirements: Iterable[str],
) -> list[importlib.metadata.Distribution]:
    """The installed distributions among the requirements and all that these need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [Requirement(text) for text in requirements]
    while wanted:
        requirement = wanted.pop()
        extras = [{"extra": extra} for extra in requirement.extras or {""}]
        if requirement.marker and not any(map(requirement.marker.evaluate, extras)):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = distribution
        wanted += [Requirement(text) for text in distribution.requires or ()]
    return list(found.values())
