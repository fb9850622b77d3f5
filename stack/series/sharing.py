# SPDX-License-Identifier: Apache-2.0
"""Gives a change of a release's steps to the other releases that have them.

In: the changed release and the texts of all. Out: the texts after it. A release that
shares a patch takes the new text where that applies; where it does not, or a later step
then does not, the release keeps its old text, which becomes a variant of its own. A
release that has a variant takes the change into it where both can be merged.

A step has one file for each text, `patches/<slug>/<release>.patch`, called after the
first release that uses it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from stack.base.releases import Release, Releases
from stack.base.store import Store
from stack.core.git import GitFailed
from stack.core.project import Project
from stack.core.repository import Repository
from stack.series.apply import trees_before_failure
from stack.series.order import ORDER, SUFFIX, format_order, read_patches
from stack.series.patch import format_patch
from stack.series.tree import Series, Step, StepTree
from stack.series.variants import changed_variant

Texts = dict[str, dict[str, bytes]]
"""The text of each step's patch by release and slug; releases from oldest to newest,
slugs in the order of the series. It is empty where the file is missing."""


def share(
    store: Store,
    project: Project,
    staged: Project,
    pinned: Releases,
    changed_series: Series,
    before: Texts,
    after: Texts,
) -> dict[str, Series]:
    """Write `after`, in which a release has new texts, also with these where another
    release shared the old text, and with the change where another has a variant.

    Args:
        staged: a copy of the project that may be written.
        changed_series: the trees of that release, with the new texts.
        before: the texts of all releases before the change.

    Returns:
        The trees of the other releases that took a new text.

    Raises:
        StackError: a release can take neither the new texts nor the old ones.
    """
    release = changed_series.base.release.name
    old, new = before.get(release, {}), after[release]
    changed = [slug for slug in new if new[slug] != old.get(slug)]
    series: dict[str, Series] = {}
    for other in pinned:
        own = before[other.name]
        offered = [slug for slug in changed if slug in own]
        offered = [slug for slug in offered if own[slug] == old.get(slug)]
        while offered and other.name != release:
            after[other.name] = {**own, **{slug: new[slug] for slug in offered}}
            write_texts(staged, after)
            taken = trees_before_failure(store, staged, other, recorded=False)
            if (problem := taken.problem) is None:
                series[other.name] = taken
                break
            kept = [slug for slug in offered if slug == problem.step] or offered
            if problem.step is None or not all(own[slug] for slug in kept):
                raise problem
            store.cache.progress(
                f"{other.name}: {', '.join(kept)} keeps the old text, as a variant of"
                f" its own: with the new one {problem.step}: {problem.message}"
            )
            offered = [slug for slug in offered if slug not in kept]
            after[other.name] = own
    write_texts(staged, after)
    for other in pinned:
        own = before[other.name]
        variants = [
            slug
            for slug in changed
            if old.get(slug) and own.get(slug, b"") not in (b"", old[slug], new[slug])
        ]
        if other.name != release and variants:
            changed_there = _into_variants(
                store, project, staged, changed_series, other, variants, after
            )
            if changed_there is not None:
                series[other.name] = changed_there
    for slug in changed:
        if names := [name for name in series if after[name].get(slug) == new[slug]]:
            store.cache.progress(f"{slug}: also changed for {', '.join(names)}")
    return series


def _into_variants(
    store: Store,
    project: Project,
    staged: Project,
    changed_series: Series,
    other: Release,
    slugs: list[str],
    after: Texts,
) -> Series | None:
    """Write the change of some steps into the variants that another release has of
    them: into all, or into none where one cannot take it. The trees of the release with
    them; None where nothing changes."""
    kept, named = after[other.name], ", ".join(slugs)

    def steps(of: Project, release: Release) -> dict[str, StepTree]:
        series = trees_before_failure(store, of, release, recorded=False)
        return {tree.slug: tree for tree in series.steps}

    def refused(why: str) -> None:
        store.cache.progress(f"{named}: {other.name} keeps its variant: {why}")
        after[other.name] = kept
        write_texts(staged, after)

    old, own = steps(project, changed_series.base.release), steps(project, other)
    new = {tree.slug: tree for tree in changed_series.steps}
    for slug in slugs:
        here = steps(staged, other)
        if any(slug not in each for each in (old, new, own, here)):
            refused(f"{slug} or a step before it does not apply")
            return None
        sides = (old[slug], new[slug], own[slug])
        text = changed_variant(store, *sides, here[slug].parent)
        if text is None:
            refused(f"the change of {slug} meets other lines there")
            return None
        after[other.name] = {**after[other.name], slug: text}
        write_texts(staged, after)
    if after[other.name] == kept:
        return None
    taken = trees_before_failure(store, staged, other, recorded=False)
    if (problem := taken.problem) is not None:
        refused(f"with the change {problem.step}: {problem.message}")
        return None
    store.cache.progress(f"{named}: also changed in the variant of {other.name}")
    return taken


def chosen_texts(
    git: Repository,
    scratch: Path,
    commits: Mapping[str, Step],
    texts: Texts,
    release: str,
) -> dict[str, bytes]:
    """The text of each commit's patch: one that is there if it has the commit's message
    and gives its tree, that of the release itself first; else the commit's own."""
    index = Repository(git.directory, index=scratch / "variant-index")
    chosen: dict[str, bytes] = {}
    for commit, step in commits.items():
        own, slug = format_patch(step), step.slug
        names = [release, *(name for name in texts if name != release)]
        offered = dict.fromkeys(
            texts[name][slug] for name in names if slug in texts.get(name, {})
        )
        same = (text for text in offered if _gives(index, text, own, commit))
        chosen[slug] = next(same, own)
    return chosen


def _gives(git: Repository, text: bytes, own: bytes, commit: str) -> bool:
    """Whether a patch says what a commit's own patch says, and changes its tree so."""
    if text == own:
        return True
    (message, _, diff), (own_message, _, own_diff) = (
        patch.partition(b"\n---\n") for patch in (text, own)
    )
    if message != own_message or not diff or not own_diff:
        return False
    results = []
    for change in (own_diff, diff):
        git.read_tree(f"{commit}^")
        try:
            git.apply(change)
        except GitFailed:
            return False
        results.append(git.write_tree())
    return results[0] == results[1]


def read_texts(project: Project, releases: Iterable[str]) -> Texts:
    """The patches of the given releases as they are, well formed or not.

    Raises:
        SeriesError: an order file is malformed.
    """
    return {
        release: {
            slug: path.read_bytes() if path.is_file() else b""
            for slug, path in read_patches(project, release).items()
        }
        for release in releases
    }


def write_texts(project: Project, texts: Texts) -> None:
    """Write the patches and the order files of the releases in `texts`. Patches that
    their series named before and do not name any more are removed, other files stay."""
    before: set[Path] = set()
    for release in texts:
        before.update(read_patches(project, release).values())
    files: dict[Path, bytes] = {}
    names: dict[tuple[str, bytes], Path] = {}
    for release, steps in texts.items():
        for slug, text in steps.items():
            own = project.patches / slug / (release + SUFFIX)
            files[names.setdefault((slug, text), own)] = text
    for path in before - files.keys():
        path.unlink(missing_ok=True)
        if path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
    for path, text in files.items():
        if text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    for release, steps in texts.items():
        order = project.series_dir(release) / ORDER
        if not steps and not order.exists():
            continue
        order.parent.mkdir(parents=True, exist_ok=True)
        noted = order.read_bytes() if order.exists() else b""
        paths = (names[slug, text] for slug, text in steps.items())
        order.write_bytes(format_order(paths, noted))
