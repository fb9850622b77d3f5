# SPDX-License-Identifier: Apache-2.0
"""Compares derived trees with real builds: one tree per run, in turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from xpustack.base.store import Store
from xpustack.builds import wheel
from xpustack.builds.build import (
    Build,
    build_key,
    build_wheel,
    manifest_of,
    members_of,
    work_folder,
)
from xpustack.core import fingerprint
from xpustack.core.cache import Cache
from xpustack.core.contents import Content
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Runner
from xpustack.series.tree import Tree


@dataclass(frozen=True)
class EqualityProof:
    """The proof that a derived tree equals a real build: how many members were
    compared, and how long the build took, in seconds."""

    members: int
    seconds: float


def next_to_prove(
    cache: Cache, derived: Sequence[tuple[Tree, Build]]
) -> tuple[Tree, Build]:
    """The derived tree to prove next: of the release whose last proof is the oldest,
    the step whose own proof is the oldest. On a tie the first tree wins.

    Args:
        derived: at least one.
    """
    proven = {id(tree): cache.results_time(_key(tree)) or 0.0 for tree, _ in derived}
    latest: dict[str, float] = {}
    for tree, _ in derived:
        name = tree.release.name
        latest[name] = max(latest.get(name, 0.0), proven[id(tree)])
    return min(
        derived, key=lambda pair: (latest[pair[0].release.name], proven[id(pair[0])])
    )


def prove_equal(
    runner: Runner, cache: Cache, store: Store, tree: Tree, build: Build
) -> EqualityProof:
    """Really build a derived tree and compare every member: path, content, mode.

    Raises:
        CheckFailed: a member differs; or the build fails.
        EnvironmentProblem: the disk is full, or a program is missing.
        Stopped: the runner was stopped.
    """
    begin = time.monotonic()
    with work_folder(cache, store, tree) as work:
        path = build_wheel(runner, store, tree, build.version, work)
        members = members_of(wheel.read(path), tree)
    real = {
        name: Content.of(member.data, member.executable)
        for name, member in members.items()
    }
    manifest = manifest_of(cache, build_key(store, tree, build.version))
    derived = manifest.members if manifest is not None else {}
    if differing := _differences(real, derived):
        raise CheckFailed(
            "the derived wheel differs from what a real build installs",
            release=tree.release.name,
            step=tree.slug,
            path=build.installed,
            detail=differing,
            hint="report it as a fault of xpustack/builds/derive.py",
        )
    proof = EqualityProof(len(real), time.monotonic() - begin)
    cache.results_put(_key(tree), {"build": build.key, "members": proof.members})
    return proof


def _differences(real: dict[str, Content], derived: dict[str, Content]) -> list[str]:
    lines = []
    for name in sorted(real.keys() | derived.keys()):
        old, new = real.get(name), derived.get(name)
        if old is None:
            lines.append(f"{name}: a real build does not install it")
        elif new is None:
            lines.append(f"{name}: only a real build installs it")
        elif old.sha256 != new.sha256:
            lines.append(f"{name}: its content differs")
        elif old != new:
            lines.append(f"{name}: its mode differs")
    return lines


def _key(tree: Tree) -> str:
    """The key of the result that records when a release's step was last proven."""
    key = fingerprint.digest(release=tree.release.name, step=tree.slug or "")
    return f"equal-{key}"
