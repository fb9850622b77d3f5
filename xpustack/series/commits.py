# SPDX-License-Identifier: Apache-2.0
"""Reads the commits of a work repository as steps.

A file that a commit adds becomes an overlay file or a kernel; a file that it changes
or deletes goes into the step's patch.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xpustack.core.errors import SeriesError, UsageError
from xpustack.core.git import GitFailed
from xpustack.core.project import Project
from xpustack.core.repository import PLAIN, LogEntry
from xpustack.series.diff import forbidden, without_ids
from xpustack.series.order import SLUG, SUFFIX, read_patches
from xpustack.series.overlay import KERNEL_HOME
from xpustack.series.patch import (
    format_patch,
    parse_patch,
    split_text,
    trailer_problems,
)
from xpustack.series.tree import Step
from xpustack.series.worktree import BASE, BRANCH, Work

STEP_LINE = re.compile(r"^Step: *(\S+) *\n?", re.MULTILINE)
"""The line by which a commit names its step; a patch's file name does that."""


@dataclass(frozen=True)
class StepCommit:
    """A commit of a work repository as a step, with the files that it adds."""

    commit: str
    tree: str
    step: Step
    added: Mapping[str, bytes]


def quoted(work: Work) -> str:
    """The work tree's path, quoted for a shell."""
    return shlex.quote(str(work.git.work_tree))


def require_end(work: Work) -> None:
    """Require that the whole series is checked out.

    Raises:
        UsageError: HEAD is not the branch `series`, or the tag `base` was moved.
    """
    place = quoted(work)
    head = work.git.head() or "no branch"
    if head != BRANCH:
        raise UsageError(
            "what is checked out is not the end of the series: the steps after it"
            " would be lost",
            release=work.state.release,
            path=work.git.work_tree,
            detail=[f"HEAD is on {head}, not on {BRANCH}"],
            hint=f"git -C {place} checkout series; or, if the series is to end here,"
            f" git -C {place} checkout -B series",
        )
    try:
        base = work.git.commit_of(BASE)
    except GitFailed:
        base = "missing"
    if base != work.state.base:
        raise UsageError(
            "the tag base does not name the base any more: the steps before it would"
            " be lost",
            release=work.state.release,
            path=work.git.work_tree,
            detail=[f"the base is {work.state.base}", f"the tag is {base}"],
            hint=f"git -C {place} tag -f base {work.state.base}",
        )


def commits_since(work: Work, project: Project, base: str) -> list[StepCommit]:
    """The commits since the commit `base` as steps, oldest first.

    Raises:
        SeriesError: a commit cannot be a step.
    """
    git, release = work.git, work.state.release
    patches = read_patches(project, release)
    step_commits: list[StepCommit] = []
    parent = base
    for commit in git.log(base, "HEAD"):
        subject = commit.message.partition("\n")[0]

        def refuse(
            problem: str,
            *detail: str,
            commit: LogEntry = commit,
            subject: str = subject,
        ) -> SeriesError:
            return SeriesError(
                problem,
                release=release,
                path=git.work_tree,
                detail=[f"commit {commit.id[:12]} {subject}", *detail],
                hint=f"git -C {quoted(work)} rebase -i base",
            )

        if commit.parents != (parent,):
            raise refuse("the commits since the tag base are not one straight line")
        slug = STEP_LINE.search(commit.message)
        if slug is None or not SLUG.fullmatch(slug[1]):
            raise refuse("the message lacks a line such as `Step: swa-rope`")
        if any(other.step.slug == slug[1] for other in step_commits):
            raise refuse(f"two commits are the step {slug[1]}")
        try:
            subject, text, trailers = split_text(STEP_LINE.sub("", commit.message))
        except ValueError as error:
            raise refuse(str(error)) from None
        if "---" in text.splitlines():
            raise refuse("a line `---` ends a message in a mail: write another line")
        patched, added = _changes(work, parent, commit.id)
        diff = without_ids(git.diff(parent, commit.id, patched))
        overlay = [path for path in added if not path.startswith(KERNEL_HOME + "/")]
        listed = [path for path in trailers.overlay if path in overlay]
        unlisted = [path for path in overlay if path not in listed]
        trailers = replace(trailers, overlay=(*listed, *unlisted))
        new = project.patches / slug[1] / (release + SUFFIX)
        path = patches.get(slug[1], new)
        written = Step(release, slug[1], path, subject, text, trailers, diff)
        try:
            step = parse_patch(release, path, format_patch(written))
        except SeriesError as error:
            raise refuse(error.message, *error.detail) from None
        problems = trailer_problems(step)
        problems += [f"{name}: {why}" for name in patched if (why := forbidden(name))]
        problems += [
            f"{name} is a kernel: change it in the commit that adds it"
            for name in patched
            if name.startswith(KERNEL_HOME + "/")
        ]
        if not patched and not added:
            problems.append("the commit changes nothing")
        if problems:
            raise refuse("; ".join(problems))
        blobs = git.blobs(added.values()) if added else {}
        contents = {name: blobs[blob] for name, blob in added.items()}
        step_commits.append(StepCommit(commit.id, commit.tree, step, contents))
        parent = commit.id
    return step_commits


def _changes(work: Work, parent: str, commit: str) -> tuple[list[str], dict[str, str]]:
    """The files that a commit changes or deletes, and those that it adds with
    their blob ids."""
    patched, added = [], {}
    for change in work.git.changes(parent, commit):
        if change.old is not None or change.new is None:
            patched.append(change.path)
        elif change.new.mode != PLAIN:
            raise SeriesError(
                f"a step may add plain files only (mode {PLAIN})",
                release=work.state.release,
                path=change.path,
                hint=f"git -C {quoted(work)} rebase -i base",
            )
        else:
            added[change.path] = change.new.blob
    return patched, added
