# SPDX-License-Identifier: Apache-2.0
"""Builds a retired release from the last commit of this repository that has it: the
tool, the patches and the kernels are those of that commit."""

import json
import os
import subprocess
import sys
from pathlib import Path

from stack.base.releases import Retired
from stack.core.cache import Cache, atomic_dir
from stack.core.checkout import Checkout
from stack.core.errors import StackError, UsageError, command, error_from_json
from stack.core.git import GitFailed
from stack.core.process import Runner
from stack.core.project import Project
from stack.release.ship import ReleaseArtifacts


def build_retired(
    project: Project, cache: Cache, retired: Retired, to: Path
) -> ReleaseArtifacts:
    """Make `to/<release>` of a retired release with the stack that proved it last, as
    `ship.ship` does.

    Raises:
        UsageError: as `checkout_of`.
        StackError: that stack's own error.
    """
    place = checkout_of(project, cache, retired)
    words = [sys.executable, "-m", "xpustack", "build", retired.name, "--json"]
    words += ["--to", str(to.absolute()), *(["--offline"] if cache.offline else [])]
    cache.progress(f"{retired.name} is retired: building it as of that commit")
    with Runner().stop_on_error() as runner:
        child = runner.start(words, cwd=place, env=os.environ, stdout=subprocess.PIPE)
        said, _ = child.communicate()
    try:
        document = json.loads(said)
    except ValueError:
        raise StackError(
            f"the stack of the commit ended with exit status {child.returncode}",
            release=retired.name,
            path=place,
            detail=said.splitlines()[-10:],
            hint=f"cd {place} && {command(*words)}",
        ) from None
    for error in document["errors"]:
        raise error_from_json(error)
    (built,) = document["data"]["built"]
    return ReleaseArtifacts(**{**built, "directory": Path(built["directory"])})


def checkout_of(project: Project, cache: Cache, retired: Retired) -> Path:
    """The files of the last commit that has a retired release, in the cache.

    Raises:
        UsageError: git's history here does not reach back to that commit.
    """
    place = cache.root / "checkouts" / retired.commit
    if place.is_dir():
        return place
    cache.progress(f"taking {retired.commit[:12]} from git's history")
    with atomic_dir(place) as temporary:
        git = Checkout.of(temporary)
        git.initialize()
        try:
            git.fetch(project.root, retired.commit, shallow=True)
        except GitFailed as error:
            raise UsageError(
                "the release is retired, and git's history here does not have the"
                " commit that has it last",
                release=retired.name,
                path=project.root,
                detail=[retired.commit, *error.stderr.strip().splitlines()[:3]],
                hint=command("git", "-C", project.root, "fetch", "--depth=1")
                + f" origin {retired.commit}",
            ) from error
        git.reset(retired.commit)
    return place
