# SPDX-License-Identifier: Apache-2.0
"""What a request's own tests show: those that it adds or changes, before its step and
after it, on the emulated XPU where the title says [XPU], else on vLLM's CPU platform.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from stack.builds.installed import Build
from stack.checks.checker import Checker
from stack.core import fingerprint
from stack.core.checkout import check_out
from stack.core.errors import CheckFailed, command
from stack.core.files import parse_python
from stack.series.result import Figure, Result
from stack.series.tree import StepTree
from stack.upstream.request_tests import RequestTests
from stack.upstream.search import NO_TIP
from stack.upstream.vllm_tests import (
    LATE,
    PROGRAM,
    Compared,
    Device,
    compared,
    lay_out,
    run,
)

SECONDS = 600
"""The most that a test, with all its cases, may take."""
_RED = ("failed", "error")


def device_of(title: str) -> Device:
    """The platform on which a request's tests are shown."""
    return "emulated" if "[XPU]" in title else "cpu"


def proven(
    checker: Checker,
    tests: RequestTests,
    tree: StepTree,
    exported: StepTree,
    device: Device,
    packages: Path | None,
) -> Result:
    """Run the modules before a step and after it; a stored pass is taken.

    Args:
        tree: the step's tested tree.
        exported: the same in upstream's form, with the request's tests.
        packages: a folder of what vLLM's tests import beside vLLM's own needs.

    Raises:
        CheckFailed: no test is red before and green after, or one has another outcome.
    """
    release, cache = tree.release, checker.cache
    builds = [checker.build(each, NO_TIP) for each in (tree.parent, tree)]
    names = [
        f"{module}::{name}"
        for module in tests.modules
        for name in _new(checker, module, exported.parent.tree_id, exported.tree_id)
    ]
    digest = fingerprint.digest(
        before=builds[0].key,
        after=builds[1].key,
        tests=exported.tree_id,
        names=names,
        device=device,
        kernels=release.xpu_kernels.version,
        support=checker.support.digest,
        program=fingerprint.files_digest({PROGRAM.name: PROGRAM}),
        packages=fingerprint.files_digest(
            fingerprint.folder_files(packages) if packages else {}
        ),
        tool=fingerprint.tool("upstream.proofs"),
        environment=fingerprint.lock(),
    )
    key = f"request-{digest}"
    if known := checker.stored(key, "test", release.name, tests.slug):
        return known
    found: list[Compared] = []
    if names:
        cache.progress(f"running {len(names)} tests of the request of {tests.slug}")
        found = _run(checker, exported, builds, names, device, packages)
    if problems := judged(found):
        again = ("upstream-tests", release.name, tests.slug, "--device", device)
        raise CheckFailed(
            "the request's tests do not prove its step",
            release=release.name,
            step=tests.slug,
            path=tests.path,
            detail=problems,
            hint=command("xpustack", *again),
        )
    return checker.keep(key, _result(found, tests.slug, release.name, device))


def _run(
    checker: Checker,
    tree: StepTree,
    builds: Sequence[Build],
    names: Sequence[str],
    device: Device,
    packages: Path | None,
) -> list[Compared]:
    """The outcomes of tests of a tree on the builds before and after its step."""
    cache, release = checker.cache, tree.release
    with cache.scratch() as scratch:
        check_out(cache, tree.tree_id, scratch / "tree")
        folder = scratch / "run"
        folder.mkdir()
        lay_out(folder, scratch / "tree", builds, names)
        run(
            checker.runner,
            checker.support,
            release,
            folder,
            device,
            1,
            packages,
            seconds=SECONDS,
        )
        return compared(folder, device)


def _new(checker: Checker, module: str, base: str, tree: str) -> list[str]:
    """The tests of a module of `tree` that `base` has otherwise, or not at all."""
    git = checker.store.git
    before, after = (_tests(git.file(each, module)) for each in (base, tree))
    return [name for name in after if before.get(name) != after[name]]


def _tests(content: bytes) -> dict[str, str]:
    """The tests of a module, and classes of tests, each as its syntax tree."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (each for each in parse_python(content).body if isinstance(each, kinds))
    return {
        node.name: ast.dump(node)
        for node in nodes
        if node.name.lower().startswith("test")
    }


def judged(found: Sequence[Compared]) -> list[str]:
    """Why the outcomes prove nothing; empty if tests are red before and green after,
    and all others pass both times, or are skipped."""
    problems = [
        f"{one.file}: {one.after.problem}" for one in found if one.after.problem
    ]
    # Of what was killed nobody knows what it would have been.
    problems += [
        f"{one.file}, before: {LATE}" for one in found if one.before.problem == LATE
    ]
    for one in found:
        for name, now in one.after.tests.items():
            if now in _RED:
                was, why = one.before.tests.get(name, "-"), one.after.reasons.get(name)
                problems.append(f"{name}: {was} before, {now} after: {why or ''}")
    if not problems and not any(map(_red, found)):
        problems.append("no test that it adds or changes is red before and green after")
    return problems


def _red(one: Compared) -> list[str]:
    """The tests that were red before, or could not run, and pass after."""
    return [
        name
        for name, (was, now) in one.differing.items()
        if was in (*_RED, "-") and now == "passed"
    ]


def _result(
    found: Sequence[Compared], slug: str, release: str, device: Device
) -> Result:
    tests = sum(one.count("after", "passed") for one in found)
    red = sum(len(_red(one)) for one in found)
    summary = f"{tests} tests, {red} fail before"
    summary += f", {tests} on a CPU too" if device == "cpu" else ""
    figures = tuple(
        Figure(name, one.before.reasons.get(name, one.before.problem), "")
        for one in found
        for name in _red(one)
    )
    seconds = sum(one.before.seconds + one.after.seconds for one in found)
    return Result(
        release, slug, "test", "passed", seconds, summary=summary, figures=figures
    )
