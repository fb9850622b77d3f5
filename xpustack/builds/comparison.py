# SPDX-License-Identifier: Apache-2.0
"""Compares a copied tree with a real build of the same tree."""

from xpustack.base.store import Store
from xpustack.builds.build import really_built
from xpustack.builds.installed import Build, manifest_of, without_byte_code
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Runner
from xpustack.series.tree import Tree


def compare(runner: Runner, store: Store, tree: Tree, build: Build) -> int:
    """Really build a copied tree and compare every member; return their number.

    Raises:
        CheckFailed: a member differs; or the build fails.
        EnvironmentProblem: the disk is full, or a program is missing.
        Stopped: the runner was stopped.
    """
    built = really_built(runner, store, tree, build.version)
    members = manifest_of(store.cache, build.key) or {}
    real, copied = map(without_byte_code, (built, members))
    states = {
        name: "a real build does not install it"
        if name not in real
        else "only a real build installs it"
        if name not in copied
        else "its content differs"
        for name in sorted(real.keys() | copied.keys())
        if real.get(name) != copied.get(name)
    }
    if states:
        raise CheckFailed(
            "the copied tree differs from what a real build installs",
            release=tree.release.name,
            step=tree.slug,
            path=build.installed,
            detail=[f"{name}: {state}" for name, state in states.items()],
            hint="report it as a fault of xpustack/builds/copy.py",
        )
    return len(real)
