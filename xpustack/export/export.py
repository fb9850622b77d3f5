# SPDX-License-Identifier: Apache-2.0
"""A release's series as pull requests for upstream: branches, mails and texts.

An export is a folder: `repository/` with one branch a step, `mails/` for `git am`,
`pull-requests/`, `cover.md`, and `range-diff.txt` against the export that the
folder held before.
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
from xpustack.export.folder import Made, previous_export, write_export
from xpustack.export.proof import require_checked, require_clean, run_alone
from xpustack.export.pull_request import Request, title_problem
from xpustack.export.upstream_trees import Person, upstream_trees
from xpustack.series.apply import trees
from xpustack.series.overlay import KERNEL_HOME, kernel_closure, overlay_files
from xpustack.series.patch import Step
from xpustack.series.static import changed_lines, new_file_lines
from xpustack.series.tree import Series, StepTree

ASSISTANT = "an AI coding agent"
PREFIX = "xpu-dsv4"


@dataclass(frozen=True)
class Exported:
    """The outcome. `changed` is False where the folder held the same already."""

    directory: Path
    made: Made
    requests: tuple[Request, ...]
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
) -> Exported:
    """Export the series of `release` to `directory`.

    Args:
        directory: new or empty, or an unchanged result of this function.
        assistant: the AI tool that every commit names as co-author.
        bisect: build each exported commit and run its test in it, alone.

    Raises:
        UsageError: the release has no steps, or `directory` holds something else.
        CheckFailed: a step is not checked as it is now, or the exported tip fails
            the base's own hooks, or with `bisect` a commit its test.
        SeriesError: a subject is no title, or a file cannot be exported.
    """
    directory = directory.absolute()
    previous = previous_export(directory, release)
    store = Store(cache)
    made = trees(store, project, release, offline=offline, progress=progress)
    if not made.steps:
        raise UsageError(
            "the release has no steps", release=release.name, hint="xpustack status"
        )
    found = proofs(project, cache, made)
    require_checked(release, found)
    for tree in made.steps:
        if problem := title_problem(tree.step):
            raise SeriesError(
                problem,
                release=release.name,
                step=tree.slug,
                path=tree.step.path,
                hint="CONTRIBUTING.md: change a step",
            )
    final = upstream_trees(project, store, made, person, assistant, progress)
    require_clean(cache, store, final, progress)
    alone = run_alone(project, cache, store, final, progress) if bisect else {}
    requests = _requests(project, final, found, alone)
    branches = {
        request.branch: tree.commit
        for request, tree in zip(requests, final.steps, strict=True)
    }
    if previous is not None and list(previous.branches.items()) == list(
        branches.items()
    ):
        return Exported(directory, previous, requests, changed=False)
    progress(f"writing the export to {directory}")
    written = write_export(store, final, requests, person, directory, previous)
    return Exported(directory, written, requests, changed=True)


def _requests(
    project: Project,
    final: Series,
    found: Sequence[Proof],
    alone: Mapping[str, Result],
) -> tuple[Request, ...]:
    before: list[Step] = []
    requests = []
    for number, (tree, proof) in enumerate(zip(final.steps, found, strict=True), 1):
        step = proof.step
        lines = changed_lines(step) + new_file_lines(project, before, step)
        requests.append(
            Request(
                step,
                proof,
                f"{PREFIX}/{step.slug}",
                f"{number:04}-{step.slug}.patch",
                lines,
                tuple(_needs(project, tree)),
                alone.get(step.slug),
            )
        )
        before.append(step)
    return tuple(requests)


def _needs(project: Project, tree: StepTree) -> Iterator[str]:
    """The earlier steps that a step changes the files of, or whose new modules its
    own new files, patches or kernels name."""
    step = tree.step
    text = step.diff.decode("utf-8", "replace") + "\n".join(
        file.content.decode("utf-8", "replace")
        for file in overlay_files(project, step).values()
    )
    own = set(_code(tree.changed))
    if step.trailers.kernels:
        modules = kernel_closure(project, step, step.trailers.kernels)
        own |= {f"{KERNEL_HOME}/{name}.py" for name in modules}
    for other in reversed(tree.parent.applied):
        names = (
            path.removesuffix(".py").replace("/", ".")
            for path in other.added
            if path.startswith("vllm/") and not path.endswith("/__init__.py")
        )
        if own & set(_code(other.changed)) or any(name in text for name in names):
            yield other.slug


def _code(paths: Iterable[str]) -> Iterator[str]:
    """The paths that are neither tests nor CI."""
    for path in paths:
        if not path.startswith(("tests/", ".buildkite/")):
            yield path
