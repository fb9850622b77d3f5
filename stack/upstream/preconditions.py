# SPDX-License-Identifier: Apache-2.0
"""What must hold before an export is written: checks, hooks, single commits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from stack.base.releases import Release
from stack.checks.checker import Checker, Proof
from stack.core.cache import Cache
from stack.core.errors import CheckFailed
from stack.core.process import clean_environment
from stack.core.project import Project
from stack.series.result import Result
from stack.series.tree import BaseTree, Series, StepTree
from stack.steptest.environment import NOT_COMPILED, vllm_variables
from stack.steptest.material import Material
from stack.steptest.server import ENVIRONMENT
from stack.steptest.step_test import IMPORT_IS_THE_DEFECT, LIMIT, XPU, StepTest
from stack.upstream.form import TEST_HOME, upstream_test
from stack.upstream.search import NO_TIP

_SHOWN = 12


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


def require_imports(checker: Checker, series: Series, base: BaseTree) -> None:
    """Require that DeepSeek-V4 can be imported from a base, unless a step of the series
    is what makes it so: else every test fails there.

    Raises:
        CheckFailed: it cannot; the end of the trace is in the error.
    """
    if IMPORT_IS_THE_DEFECT.intersection(tree.slug for tree in series.steps):
        return
    built, cache = checker.build(base, NO_TIP), checker.cache
    cache.progress(f"importing vLLM of {base.release.name}")
    with cache.scratch() as work:
        output = work / "output.txt"
        path = [built.installed, checker.laid_out()]
        kernels = base.release.xpu_kernels.version
        variables = vllm_variables(kernels, XPU.entry_point, work, path)
        done = checker.server.run(
            [f"{XPU.ahead}"],
            cwd=work,
            path=path,
            env=clean_environment(
                **{**ENVIRONMENT, **variables, **NOT_COMPILED, "TMPDIR": str(work)}
            ),
            output=output,
            limit=LIMIT,
        )
        printed = output.read_text("utf-8", "replace") if output.is_file() else ""
    if done.status:
        raise CheckFailed(
            "DeepSeek-V4 does not import from the base, so no step can be tested there",
            release=base.release.name,
            detail=printed.rstrip().splitlines()[-_SHOWN:],
            hint="a commit that imports, with what requirements/constraints.txt pins",
        )


def require_clean(
    project: Project,
    cache: Cache,
    base: BaseTree,
    first: Iterable[str],
    every: Sequence[Series],
    types: bool,
) -> dict[str, str]:
    """Run the base's own hooks on everything that exported tips change.

    Args:
        base: without the first commit of an export.
        first: what that brings, where a series stands on it.
        types: whether mypy runs, too.

    Returns:
        What they say of each tip, by its slug.

    Raises:
        CheckFailed: they find something that is not in the base.
    """
    summaries = {}
    with Checker(project, cache) as checker:
        for exported in every:
            tip = exported.steps[-1]
            if exported.base.tree_id != base.tree_id:
                tip = replace(tip, changed=tuple(sorted({*tip.changed, *first})))
            if checker.known_lint("tip", base, tip, types=types) is None:
                cache.progress(
                    f"running the base's own hooks on the exported {tip.label}"
                )
            result = checker.lint("tip", base, tip, types=types)
            if result.status != "passed":
                raise CheckFailed(
                    "an exported branch fails the base's own hooks",
                    release=base.release.name,
                    step=tip.slug,
                    detail=result.detail,
                    hint=f"xpustack check {base.release.name} --tip --only lint",
                )
            summaries[tip.label] = result.summary
    return summaries


def test_commits(
    project: Project, cache: Cache, every: Sequence[Series]
) -> dict[str, Result]:
    """Build the last commit of each exported series and run its own test from its own
    files.

    Raises:
        CheckFailed: a commit cannot be built, or fails its test.
    """
    with Checker(project, cache) as checker:
        tips = (exported.steps[-1] for exported in every)
        return {tree.slug: _test_commit(checker, tree) for tree in tips}


def _test_commit(checker: Checker, tree: StepTree) -> Result:
    step, name, cache = tree.step, tree.release.name, checker.cache
    cache.progress(f"testing the exported {step.slug}")
    built = checker.build(tree, NO_TIP)
    with cache.scratch() as scratch:
        material = _material(checker, tree, scratch)
        kernels = tree.release.xpu_kernels.version
        test = StepTest(step, material, None, built, kernels)
        key = f"export-{test.key}"
        if known := checker.stored(key, "test", name, step.slug):
            return known
        result = test.run(checker.server, cache, checker.laid_out())
    if result.status != "passed":
        raise CheckFailed(
            "the exported commit fails its own test",
            release=name,
            step=step.slug,
            path=material.module,
            detail=result.detail,
            hint=f"xpustack check {name} {step.slug}",
        )
    summary = f"{result.summary.partition(',')[0]} passed"
    return checker.keep(key, msgspec.structs.replace(result, summary=summary))


def _material(checker: Checker, tree: StepTree, scratch: Path) -> Material:
    """The test package from the exported tree itself, with this repository's emulation
    in place of a GPU."""
    git = checker.store.git
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
    return Material(upstream_test(tree.step), files, checker.support)
