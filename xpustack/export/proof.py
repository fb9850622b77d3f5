# SPDX-License-Identifier: Apache-2.0
"""What an export must show before it is written: checks, hooks, single commits."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds.build import build, build_version
from xpustack.checks.proof import Proof, linted_key
from xpustack.checks.results import Result, stored_pass
from xpustack.core.cache import Cache
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Runner
from xpustack.core.progress import Progress
from xpustack.core.project import Project
from xpustack.core.repository import Repository
from xpustack.export.upstream_form import TEST_HOME, upstream_test
from xpustack.lint import linter
from xpustack.series.tree import Series, StepTree
from xpustack.steptest.server import Server
from xpustack.steptest.step_test import Material, StepTest, Support


def require_checked(release: Release, found: Sequence[Proof]) -> None:
    """Insist on green cached checks of every step as it is now.

    Raises:
        CheckFailed: there are none of some step.
    """
    open_ = [proof for proof in found if proof.missing]
    if open_:
        raise CheckFailed(
            "the series is not checked as it is now: an export needs green checks",
            release=release.name,
            detail=[f"{one.step.slug}: {', '.join(one.missing)}" for one in open_],
            hint=f"xpustack check {release.name}",
        )


def require_clean(
    cache: Cache, store: Store, final: Series, progress: Progress
) -> None:
    """Run the base's own hooks on everything that the exported tip changes.

    Raises:
        CheckFailed: they find something that they do not find in the base.
    """
    base, tip = final.base, final.tip
    key = linted_key(base, tip)
    if cache.results_get(key) is not None:
        return
    progress("running the base's own hooks on the exported tip")
    with Runner().stop_on_error() as runner:
        done = linter.lint(runner, cache, store, base, tip)
    if done.new:
        raise CheckFailed(
            "the exported tip fails the base's own hooks",
            release=base.release.name,
            detail=[str(finding) for finding in done.new[:20]],
            hint=f"xpustack check {base.release.name} --tip --only lint",
        )
    summary = f"0 new, {done.old} of the base; {', '.join(done.tools)}"
    name = base.release.name
    passed = Result(name, "tip", "lint", "passed", done.seconds, summary=summary)
    cache.results_put(key, msgspec.to_builtins(passed))


def run_alone(
    project: Project,
    cache: Cache,
    store: Store,
    final: Series,
    progress: Progress,
) -> dict[str, Result]:
    """Build each exported commit and run its own test from its own files.

    Raises:
        CheckFailed: a commit cannot be built, or fails its test.
    """
    found = {}
    with Runner().stop_on_error() as runner, closing(Server(runner)) as server:
        for tree in final.steps:
            found[tree.slug] = _alone(
                project,
                runner,
                server,
                cache,
                store,
                tree,
                len(final.steps),
                progress,
            )
    return found


def _alone(
    project: Project,
    runner: Runner,
    server: Server,
    cache: Cache,
    store: Store,
    tree: StepTree,
    last: int,
    progress: Progress,
) -> Result:
    step, name = tree.step, tree.release.name
    progress(f"testing the exported {step.slug}")
    built = build(
        runner, cache, store, tree, build_version(tree, last), progress=progress
    )
    with cache.scratch() as scratch:
        material = _material(project, store.git, tree, scratch)
        kernels = tree.release.xpu_kernels.version
        test = StepTest(step, material, None, built, kernels)
        key = f"export-{test.key}"
        known = stored_pass(cache.results_get(key), "test", name, step.slug)
        if known is not None:
            return known
        done = test.run(server, cache)
    if done.problems:
        raise CheckFailed(
            "the exported commit fails its own test",
            release=name,
            step=step.slug,
            path=material.module,
            detail=[*done.problems, "", *done.output],
            hint=f"xpustack check {name} {step.slug}",
        )
    summary = f"{done.counts['tests']} tests passed"
    result = Result(
        name, step.slug, "test", "passed", done.seconds, False, summary, tip=True
    )
    cache.results_put(key, msgspec.to_builtins(result))
    return result


def _material(
    project: Project, git: Repository, tree: StepTree, scratch: Path
) -> Material:
    """The exported test package out of the tree itself, with this repository's
    emulation beside it in place of a GPU."""
    support = Support.of(project)
    entries = git.files(tree.tree_id, [TEST_HOME])
    contents = git.blobs(entry.blob for entry in entries.values())
    files = {}
    for number, (path, entry) in enumerate(entries.items()):
        files[path] = scratch / str(number)
        files[path].write_bytes(contents[entry.blob])
    empty = scratch / "empty"
    empty.touch()
    for folder in list(Path(TEST_HOME).parents)[:-1]:
        files[f"{folder}/__init__.py"] = empty
    return Material(upstream_test(tree.step), files, support)
