# SPDX-License-Identifier: Apache-2.0
"""What must hold before an export is written: checks, hooks, single commits."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds.build import build, build_version
from xpustack.checks.checker import Proof
from xpustack.checks.results import Result, stored_pass
from xpustack.core.cache import Cache
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Runner
from xpustack.core.project import Project
from xpustack.core.repository import Repository
from xpustack.export.standing import NO_TIP
from xpustack.export.upstream_form import TEST_HOME, upstream_test
from xpustack.forks.server import Server
from xpustack.lint.linter import Linter, lint_key
from xpustack.series.tree import Series, StepTree
from xpustack.steptest.material import Material, Support
from xpustack.steptest.server import warm_server
from xpustack.steptest.step_test import StepTest


def require_checked(release: Release, step_proofs: Sequence[Proof]) -> None:
    """Require green cached checks of every step's current state.

    Raises:
        CheckFailed: a step lacks them.
    """
    unproven = [proof for proof in step_proofs if proof.missing]
    if unproven:
        raise CheckFailed(
            "the series is not checked as it is now: an export needs green checks",
            release=release.name,
            detail=[
                f"{proof.step.slug}: {', '.join(proof.missing)}" for proof in unproven
            ],
            hint=f"xpustack check {release.name}",
        )


def require_clean(
    cache: Cache, store: Store, every: Sequence[Series], types: bool
) -> dict[str, str]:
    """Run the base's own hooks on everything that exported tips change.

    Args:
        types: whether mypy runs, too.

    Returns:
        What they say of each tip, by its slug.

    Raises:
        CheckFailed: they find something that is not in the base.
    """
    summaries = {}
    with (
        Runner().stop_on_error() as runner,
        closing(Linter(runner, store)) as linter,
    ):
        for exported in every:
            base, tip = exported.base, exported.tip
            key = lint_key(base, tip, types=types)
            known = stored_pass(
                cache.results_get(key), "lint", base.release.name, "tip"
            )
            if known is None:
                cache.progress(
                    f"running the base's own hooks on the exported {tip.label}"
                )
                result = linter.lint(base, tip, types=types)
                if result.new:
                    raise CheckFailed(
                        "an exported branch fails the base's own hooks",
                        release=base.release.name,
                        step=tip.slug,
                        detail=[str(finding) for finding in result.new[:20]],
                        hint=f"xpustack check {base.release.name} --tip --only lint",
                    )
                known = Result(
                    base.release.name,
                    "tip",
                    "lint",
                    "passed",
                    result.seconds,
                    summary=result.summary,
                    typed=result.typed,
                )
                cache.results_put(key, msgspec.to_builtins(known))
            summaries[tip.label] = known.summary
    return summaries


def test_commits(
    project: Project, cache: Cache, store: Store, every: Sequence[Series]
) -> dict[str, Result]:
    """Build the last commit of each exported series and run its own test from its own
    files.

    Raises:
        CheckFailed: a commit cannot be built, or fails its test.
    """
    results = {}
    with Runner().stop_on_error() as runner, closing(warm_server(runner)) as server:
        for exported in every:
            tree = exported.steps[-1]
            results[tree.slug] = _test_commit(
                project, runner, server, cache, store, tree
            )
    return results


def _test_commit(
    project: Project,
    runner: Runner,
    server: Server,
    cache: Cache,
    store: Store,
    tree: StepTree,
) -> Result:
    step, name = tree.step, tree.release.name
    cache.progress(f"testing the exported {step.slug}")
    version = build_version(tree, NO_TIP)
    built = build(runner, store, tree, version)
    with cache.scratch() as scratch:
        material = _material(project, store.git, tree, scratch)
        kernels = tree.release.xpu_kernels.version
        test = StepTest(step, material, None, built, kernels)
        key = f"export-{test.key}"
        stored = stored_pass(cache.results_get(key), "test", name, step.slug)
        if stored is not None:
            return stored
        report = test.run(server, cache)
    if report.problems:
        raise CheckFailed(
            "the exported commit fails its own test",
            release=name,
            step=step.slug,
            path=material.module,
            detail=[*report.problems, "", *report.output],
            hint=f"xpustack check {name} {step.slug}",
        )
    summary = f"{report.counts['tests']} tests passed"
    result = Result(
        name, step.slug, "test", "passed", report.seconds, False, summary, tip=True
    )
    cache.results_put(key, msgspec.to_builtins(result))
    return result


def _material(
    project: Project, git: Repository, tree: StepTree, scratch: Path
) -> Material:
    """The test package from the exported tree itself, with this repository's emulation
    in place of a GPU."""
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
