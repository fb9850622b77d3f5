# SPDX-License-Identifier: Apache-2.0
"""A release's series as pull requests for upstream: branches, mails and texts.

An export is a folder: `repository/` with one branch per step, `mails/` for `git am`,
`pull-requests/`, `cover.md`, and `range-diff.txt` against the folder's previous
export.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.checks.proof import Proof, proofs
from xpustack.checks.results import Result
from xpustack.core.cache import Cache
from xpustack.core.errors import SeriesError, UsageError
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.export.folder import ExportState, previous_export, write_export
from xpustack.export.preconditions import require_checked, require_clean, test_commits
from xpustack.export.pull_request import PullRequest, title_problem
from xpustack.export.upstream_trees import Person, upstream_trees
from xpustack.series.apply import trees
from xpustack.series.overlay import KERNEL_HOME, kernel_closure, overlay_files
from xpustack.series.revision import require_recorded
from xpustack.series.static import changed_lines, new_file_lines
from xpustack.series.tree import Series, StepTree

ASSISTANT = "an AI coding agent"
PREFIX = "xpu-dsv4"


@dataclass(frozen=True)
class ExportResult:
    """The result. `changed` is False where the folder already held the same export."""

    directory: Path
    state: ExportState
    requests: tuple[PullRequest, ...]
    changed: bool


def export(
    project: Project,
    cache: Cache,
    release: Release,
    directory: Path,
    person: Person,
    *,
    assistant: str = ASSISTANT,
    bisect: bool = False,
    offline: bool = False,
    progress: Progress = silent,
) -> ExportResult:
    """Export the series of `release` to `directory`.

    Args:
        directory: new, empty, or an unchanged earlier export.
        assistant: the AI tool that every commit names as co-author.
        bisect: also build each exported commit and run its own test there.

    Raises:
        UsageError: the release has no steps, or `directory` holds something else.
        CheckFailed: a step lacks green checks of its current state, the exported tip
            fails the base's own hooks, or with `bisect` a commit fails its test.
        SeriesError: a subject cannot be a title, a file cannot be exported, or the
            series changed since its revision was recorded.
    """
    directory = directory.absolute()
    previous = previous_export(directory, release)
    store = Store(cache)
    series = trees(store, project, release, offline=offline, progress=progress)
    if not series.steps:
        raise UsageError(
            "the release has no steps", release=release.name, hint="xpustack status"
        )
    require_recorded(project, release, [tree.step for tree in series.steps])
    step_proofs = proofs(project, cache, series)
    require_checked(release, step_proofs)
    for tree in series.steps:
        if problem := title_problem(tree.step):
            raise SeriesError(
                problem,
                release=release.name,
                step=tree.slug,
                path=tree.step.path,
                hint="CONTRIBUTING.md: change a step",
            )
    exported = upstream_trees(project, store, series, person, assistant, progress)
    require_clean(cache, store, exported, progress)
    own_tests = (
        test_commits(project, cache, store, exported, progress) if bisect else {}
    )
    requests = _requests(project, exported, step_proofs, own_tests)
    branches = {
        request.branch: tree.commit
        for request, tree in zip(requests, exported.steps, strict=True)
    }
    if previous is not None and list(previous.branches.items()) == list(
        branches.items()
    ):
        return ExportResult(directory, previous, requests, changed=False)
    progress(f"writing the export to {directory}")
    state = write_export(store, exported, requests, person, directory, previous)
    return ExportResult(directory, state, requests, changed=True)


def _requests(
    project: Project,
    exported: Series,
    step_proofs: Sequence[Proof],
    own_tests: Mapping[str, Result],
) -> tuple[PullRequest, ...]:
    requests = []
    pairs = zip(exported.steps, step_proofs, strict=True)
    for number, (tree, proof) in enumerate(pairs, start=1):
        step = proof.step
        lines = changed_lines(step) + new_file_lines(overlay_files(project, step))
        requests.append(
            PullRequest(
                step,
                proof,
                f"{PREFIX}/{step.slug}",
                f"{number:04}-{step.slug}.patch",
                lines,
                tuple(_needs(project, tree)),
                own_tests.get(step.slug),
            )
        )
    return tuple(requests)


def _needs(project: Project, tree: StepTree) -> Iterator[str]:
    """The earlier steps that a step builds on: it changes the same files, or its
    patch or its new files name their new modules."""
    step = tree.step
    text = step.diff.decode("utf-8", "replace") + "\n".join(
        file.content.decode("utf-8", "replace")
        for file in overlay_files(project, step).values()
    )
    files = kernel_closure(project, step, step.trailers.kernels)
    own_paths = {f"{KERNEL_HOME}/{name}" for name in files} | set(_code(tree.changed))
    for earlier in reversed(tree.parent.applied):
        modules_added = (
            path.removesuffix(".py").replace("/", ".")
            for path in earlier.added
            if path.startswith("vllm/") and not path.endswith("/__init__.py")
        )
        shares_files = own_paths & set(_code(earlier.changed))
        if shares_files or any(module in text for module in modules_added):
            yield earlier.slug


def _code(paths: Iterable[str]) -> Iterator[str]:
    """The paths that are neither tests nor CI."""
    for path in paths:
        if not path.startswith(("tests/", ".buildkite/")):
            yield path
