# SPDX-License-Identifier: Apache-2.0
"""A release's steps as pull requests for upstream: branches, mails and texts.

An export is a folder: `repository/` with one branch per step, `mails/` for `git am`,
`pull-requests/`, `cover.md`, `requests.csv`, and `range-diff.txt` against the folder's
previous export. On a clone the branches go into the clone, or into a bundle.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stack.base.clone import Clone
from stack.base.releases import Release
from stack.base.store import Store
from stack.checks.checker import Checker
from stack.core.cache import Cache
from stack.core.errors import SeriesError, UsageError
from stack.core.project import Project
from stack.core.repository import NoSuchPath
from stack.series.apply import trees
from stack.series.order import require_step
from stack.series.overlay import overlay_files
from stack.series.result import Result
from stack.series.revision import require_recorded
from stack.series.static import changed_lines, new_file_lines
from stack.series.tree import BaseTree, Series
from stack.upstream.branches import branch_of, require_free, require_room
from stack.upstream.folder import (
    ExportState,
    Place,
    known_needs,
    previous_export,
    write_export,
)
from stack.upstream.form import FIRST, is_kernel
from stack.upstream.labels import RULES, labels
from stack.upstream.notes import Notes, read_notes
from stack.upstream.pairs import Conflicts, conflicting
from stack.upstream.preconditions import (
    require_checked,
    require_clean,
    require_imports,
    test_commits,
)
from stack.upstream.proofs import device_of, proven
from stack.upstream.pull_request import PullRequest, title_problem
from stack.upstream.request_tests import read_request_tests
from stack.upstream.search import Standings
from stack.upstream.texts import TEMPLATE, Template, texts
from stack.upstream.trees import Person, UpstreamForms, upstream_trees
from stack.upstream.vllm_tests import require_packages

ROWS = "docs/data/requests.csv"
"""Where the steps of a release were found to stand."""


@dataclass(frozen=True)
class ExportResult:
    """The result. `conflicts` has the pairs of branches that stand alone and do not
    merge; `changed` is False where the folder already held the same export."""

    directory: Path
    state: ExportState
    requests: tuple[PullRequest, ...]
    conflicts: Conflicts
    changed: bool


def export(
    project: Project,
    cache: Cache,
    release: Release,
    directory: Path,
    person: Person,
    *,
    assistant: str,
    slugs: Sequence[str] = (),
    clone: Clone | None = None,
    bundle: bool = False,
    bisect: bool = False,
    packages: Path | None = None,
) -> ExportResult:
    """Export steps of `release` to `directory`.

    Args:
        directory: new, empty, or an unchanged earlier export.
        assistant: the AI tool that every commit names as co-author.
        slugs: the steps; none for all but those that stay in this stack.
        clone: where the branches are to stand, in place of the release's own base.
        bundle: write the branches for a clone into a bundle, not into it.
        bisect: also build each branch as it is exported, and run its own test there.
        packages: a folder of what vLLM's tests import beside vLLM's own needs.

    Raises:
        UsageError: the release has no steps, `directory` or a branch of the clone
            holds something else, or a request's tests import what is not there.
        CheckFailed: a step lacks green checks of its current state, a branch fails the
            base's own hooks, with `bisect` its test, or a request's tests are not red
            before and green after.
        SeriesError: a subject cannot be a title, a file cannot be exported, or the
            series changed since its revision was recorded.
    """
    directory = directory.absolute()
    store = Store(cache)
    series, base, parent = _places(project, cache, release, clone)
    previous = previous_export(directory, base.release)
    if clone is not None and not bundle:
        require_room(clone)
    wanted, notes = _wanted(project, release, series, slugs)
    if any(read_request_tests(project, slug) for slug in notes):
        require_packages(release, packages, "export")
    require_recorded(project, release, [tree.step for tree in series.steps])
    require_checked(
        release,
        [
            proof
            for proof in Checker(project, cache).proofs(series)
            if proof.step.slug in notes
        ],
    )
    with Checker(project, cache) as checker:
        if clone is not None:
            require_imports(checker, series, base)
        known = known_needs(project.root / ROWS, release.name)
        found = Standings(checker, series, base, _recorded(project, series), known)
        requests = tuple(_requests(project, found, wanted, notes))
    for request in requests:
        for title in (request.title, *(step.subject for step in request.steps)):
            if problem := title_problem(title):
                raise SeriesError(
                    problem,
                    release=release.name,
                    step=request.slug,
                    path=request.steps[-1].path,
                    hint="CONTRIBUTING.md: change a step",
                )
    standing = [request for request in requests if request.standing.series]
    tested = [
        request.standing.series for request in standing if request.standing.series
    ]
    whole = None if slugs else found.together()
    every = [*tested, *([whole] if whole else [])]
    forms = UpstreamForms.of(project, store, series, every)

    def exported(checked: Series) -> Series:
        return upstream_trees(project, store, forms, checked, parent, person, assistant)

    cache.progress("writing the commits")
    branches = {
        request.slug: exported(checked)
        for request, checked in zip(standing, tested, strict=True)
    }
    if whole is not None:
        # The types of all branches at once: mypy takes 30 s for each.
        require_clean(project, cache, base, forms.common, [exported(whole)], types=True)
    ends = list(branches.values())
    hooks = require_clean(project, cache, base, forms.common, ends, types=whole is None)
    proofs = _proofs(project, cache, forms, standing, branches, packages)
    own_tests = [end for end in ends if end.steps[-1].slug in forms.tests]
    alone_runs = test_commits(project, cache, own_tests) if bisect else {}
    requests = tuple(
        replace(
            _exported(store, request, parent, branches[request.slug], hooks),
            alone=alone_runs.get(request.slug),
            proofs=proofs,
        )
        if request.slug in branches
        else request
        for request in requests
    )
    commits = {
        request.branch: branches[request.slug].tip.commit for request in standing
    }
    on_first = [branches[request.slug] for request in requests if request.on_first]
    if on_first:
        commits = {branch_of(FIRST): on_first[0].base.commit, **commits}
    alone = {
        request.slug: branches[request.slug]
        for request in standing
        if not request.needs
    }
    conflicts = conflicting(store, base, alone)
    place = Place(store, base, parent, clone, bundle)
    template = Template.read(_text(store, base, TEMPLATE))
    said = partial(texts, template, requests, conflicts, base.release.name, str(person))
    if previous and previous.same(parent, commits, said(previous.number)):
        return ExportResult(directory, previous, requests, conflicts, changed=False)
    if clone is not None and not bundle:
        require_free(clone, commits, previous.branches if previous else {})
    cache.progress(f"writing the export to {directory}")
    state = write_export(place, commits, said, person, directory, previous)
    return ExportResult(directory, state, requests, conflicts, changed=True)


def standings(
    project: Project,
    cache: Cache,
    release: Release,
    *,
    slugs: Sequence[str] = (),
    known: Mapping[str, tuple[str, ...]],
    clone: Clone | None = None,
) -> Iterator[PullRequest]:
    """Where the steps stand, one request as soon as it is found, without a branch of
    them: no hooks, no texts.

    Args:
        known: what steps need that were tested before; those of `slugs` are tested
            again. The others are as for `export`.

    Raises:
        UsageError: the release has no steps, or none of that name.
    """
    series, base, _ = _places(project, cache, release, clone)
    wanted, notes = _wanted(project, release, series, slugs)
    again = wanted.union(*(notes[slug].along for slug in wanted))
    with Checker(project, cache) as checker:
        if clone is not None:
            require_imports(checker, series, base)
        found = Standings(checker, series, base, _recorded(project, series))
        for slug in (tree.slug for tree in series.steps if tree.slug not in again):
            if slug in known:
                found.take(slug, known[slug])
        yield from _requests(project, found, wanted, notes)


def _places(
    project: Project, cache: Cache, release: Release, clone: Clone | None
) -> tuple[Series, BaseTree, str]:
    """The series, the base that its steps are to stand on, and that base's commit."""
    store = Store(cache)
    series = trees(store, project, release)
    if clone is None:
        return series, series.base, series.base.commit
    onto, commit = clone.base(store, release)
    return series, BaseTree(onto, commit.id, commit.tree), clone.commit


def _wanted(
    project: Project, release: Release, series: Series, slugs: Sequence[str]
) -> tuple[set[str], dict[str, Notes]]:
    """The steps that name a request, and the notes on these and on their commits."""
    if not series.steps:
        raise UsageError(
            "the release has no steps", release=release.name, hint="xpustack status"
        )
    for slug in slugs:
        require_step([tree.slug for tree in series.steps], slug, release.name)
    wanted = set(
        slugs or (tree.slug for tree in series.steps if not tree.step.trailers.stays)
    )
    if not wanted:
        raise UsageError(
            "all steps of the release stay in this stack",
            release=release.name,
            hint=f"xpustack export {release.name} STEP",
        )
    notes = {slug: read_notes(project, slug) for slug in wanted}
    return wanted - {slug for note in notes.values() for slug in note.along}, notes


def _recorded(project: Project, series: Series) -> dict[str, tuple[str, ...]]:
    """The earlier steps that the notes of each step name."""
    found: dict[str, tuple[str, ...]] = {}
    for tree in series.steps:
        note = read_notes(project, tree.slug)
        named = (*note.along, *note.after)
        found[tree.slug] = tuple(slug for slug in named if slug in found)
    return found


def _requests(
    project: Project, found: Standings, wanted: set[str], notes: Mapping[str, Notes]
) -> Iterator[PullRequest]:
    """The requests in the series' order, each with where its steps stand."""
    order = [tree.slug for tree in found.source.steps]
    for slug in (slug for slug in order if slug in wanted):
        note = notes[slug]
        for each in note.after:
            earlier = order[: order.index(slug)]
            require_step(earlier, each, found.source.base.release.name)
        commits = tuple(map(found.of, (*note.along, slug)))
        steps = [standing.step.step for standing in commits]
        lines = sum(
            changed_lines(step) + new_file_lines(overlay_files(project, step))
            for step in steps
        )
        yield PullRequest(commits, note, branch_of(slug), lines)


def _proofs(
    project: Project,
    cache: Cache,
    forms: UpstreamForms,
    standing: Sequence[PullRequest],
    branches: Mapping[str, Series],
    packages: Path | None,
) -> dict[str, tuple[tuple[str, ...], Result]]:
    """Of the requests' own tests their modules and what they show, by step."""
    found = {}
    with Checker(project, cache) as checker:
        for request in standing:
            own = {commit.slug for commit in request.commits}
            tested = request.standing.series
            assert tested is not None, "it stands"
            for tree, exported in zip(
                tested.steps, branches[request.slug].steps, strict=True
            ):
                tests = forms.requests.get(tree.slug)
                if tests is None or tree.slug not in own:
                    continue
                device = device_of(request.title)
                shown = proven(checker, tests, tree, exported, device, packages)
                found[tree.slug] = tests.modules, shown
    return found


def _exported(
    store: Store,
    request: PullRequest,
    parent: str,
    branch: Series,
    hooks: Mapping[str, str],
) -> PullRequest:
    """A request with what its branch on the commit `parent` shows."""
    changed = sorted({path for tree in branch.steps for path in tree.changed})
    own = branch.steps[-len(request.commits) :]
    kernels = [path for tree in own for path in tree.added if is_kernel(path)]
    entries = store.git.files(branch.tip.tree_id, kernels)
    brought = store.git.blobs(entry.blob for entry in entries.values())
    return replace(
        request,
        lint=hooks.get(request.slug, ""),
        labels=labels(_text(store, branch.base, RULES), request.title, changed),
        kernels=sum(text.count(b"\n") for text in brought.values()),
        on_first=branch.base.commit != parent,
    )


def _text(store: Store, base: BaseTree, path: str) -> str:
    """A file of the base; empty where it has none."""
    try:
        return store.git.file(base.tree_id, path).decode("utf-8", "replace")
    except NoSuchPath:
        return ""
