# SPDX-License-Identifier: Apache-2.0
"""Moves steps onto a changed tree without merging.

A hunk may be at another line, but its context must be unchanged: `git apply` with
full context and no fuzz. Otherwise a person rebases, or `refresh` merges.
"""

from collections.abc import Sequence
from dataclasses import replace

from xpustack.base.store import Store
from xpustack.core.errors import ApplyError
from xpustack.core.git import GitFailed
from xpustack.core.project import Project
from xpustack.series.diff import parse_diff
from xpustack.series.overlay import NewFiles
from xpustack.series.patch import Step
from xpustack.series.tree import Tree


def rederive(
    store: Store, project: Project, tip: Tree, before: Sequence[Step], later: list[Step]
) -> list[Step]:
    """The steps `later` as they must read on top of `tip`.

    Args:
        project: the project with the overlay files and kernels of the steps.
        before: the steps of `tip`.

    Raises:
        ApplyError: a hunk's context is missing, or a file that a step adds exists.
        SeriesError: an overlay file or kernel is missing.
    """
    steps: list[Step] = []
    parent = tip.tree_id
    new_files = NewFiles(project, before)
    with store.writing() as writer, store.cache.scratch() as scratch:
        writer.read_tree(parent)
        for step in later:
            if step.diff:
                try:
                    writer.apply(step.diff)
                except GitFailed as error:
                    raise ApplyError(
                        "the step does not fit the changed steps before it",
                        release=step.release,
                        step=step.slug,
                        path=step.path,
                        detail=error.stderr,
                        hint=f"xpustack apply {step.release} --to NEW (without --upto),"
                        " change the early step there with git rebase -i base,"
                        " xpustack save NEW",
                    ) from None
            diff = writer.diff(parent, writer.write_tree())
            rederived = replace(step, diff=diff, files=parse_diff(diff))
            files = new_files.of(rederived)
            if files:
                writer.add(
                    {path: file.content for path, file in files.items()}, scratch
                )
            parent = writer.write_tree()
            steps.append(rederived)
    return steps
