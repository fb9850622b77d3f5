# SPDX-License-Identifier: Apache-2.0
"""The repository that `apply --to` makes for people to work in, and its commits as
steps.

A file that a commit adds becomes an overlay file or a kernel; a file that it changes
or deletes goes into the step's patch.
"""

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import Cache, atomic_dir, replace_dir
from stack.core.checkout import Checkout
from stack.core.errors import SeriesError, StackError, UsageError, command
from stack.core.files import link_or_copy, not_ours, vacant
from stack.core.git import GitFailed
from stack.core.project import Project
from stack.core.repository import HEADS, PLAIN, LogEntry
from stack.series.apply import trees
from stack.series.diff import without_ids
from stack.series.order import SLUG, SUFFIX, read_order, read_patches
from stack.series.overlay import TRITON, TRITON_IN_VLLM
from stack.series.patch import (
    format_patch,
    parse_patch,
    split_text,
    step_problems,
)
from stack.series.tree import KERNEL_HOME, Series, Step

BRANCH = HEADS + "series"
BASE = "refs/tags/base"
STEPS = "refs/tags/step/"
"""What comes before the slug in the tag of a step's commit."""
STATE = "xpustack.json"
STEP_LINE = re.compile(r"^Step: *(.*\S) *\n?", re.MULTILINE)
"""The line by which a commit names its step; a patch's file name does that."""

_Name = Annotated[str, msgspec.Meta(pattern=r"^v[0-9][A-Za-z0-9.+!_-]*$")]
_Commit = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
_Slug = Annotated[str, msgspec.Meta(pattern=f"^{SLUG.pattern}$")]


class State(msgspec.Struct, frozen=True):
    """The content of `.git/xpustack.json`, which `apply_to` writes.

    `base` and `tip` are commit ids. `upto` is None if the whole series was applied,
    else the slug of the last applied step, or `base` for none. `source` is the release
    from which a refresh carries steps there, `dropped` are the steps that it is to
    leave behind.
    """

    release: _Name
    base: _Commit
    tip: _Commit
    upto: _Slug | None = None
    source: _Name | None = None
    dropped: tuple[_Slug, ...] = ()


@dataclass(frozen=True)
class StepCommit:
    """A commit of a work repository as a step, with the files that it adds."""

    commit: str
    tree: str
    step: Step
    added: Mapping[str, bytes]


@dataclass(frozen=True)
class Work:
    """A repository that `apply_to` made."""

    git: Checkout
    state: State

    @classmethod
    def at(cls, directory: Path) -> "Work":
        """The repository that `apply_to` made in `directory`.

        Raises:
            UsageError: there is none, or its `.git/xpustack.json` is damaged.
        """
        path = directory / ".git" / STATE
        try:
            state = msgspec.json.decode(path.read_bytes(), type=State)
        except OSError:
            raise UsageError(
                "the directory was not made by xpustack apply",
                path=directory,
                hint="xpustack apply RELEASE --to a new directory",
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                "what xpustack apply noted about the directory is damaged",
                path=path,
                detail=[str(error)],
                hint=start_over("RELEASE", directory),
            ) from None
        return cls(Checkout.of(directory.absolute()), state)

    def note(self, state: State) -> None:
        """Write what is known of the repository."""
        (self.git.directory / STATE).write_bytes(msgspec.json.encode(state) + b"\n")

    def command(self, *words: str) -> str:
        """A git command for a person to run there."""
        return command("git", "-C", self.git.work_tree, *words)

    def refusal(
        self,
        problem: str,
        *detail: str,
        hint: str,
        step: str | None = None,
        kind: type[StackError] = UsageError,
    ) -> StackError:
        """The error about something in the repository."""
        return kind(
            problem,
            release=self.state.release,
            step=step,
            path=self.git.work_tree,
            detail=detail,
            hint=hint,
        )

    def pending(self, *, ignored: bool = False) -> list[str]:
        """The uncommitted changes, in the words of `git status`."""
        operations = [f"in progress: {name}" for name in self.git.unfinished()]
        return self.git.status(ignored=ignored) + operations

    def require_end(self) -> None:
        """Require that the whole series is checked out, and all is committed.

        Raises:
            UsageError: there are other changes, or HEAD is not the branch `series`, or
                the tag `base` was moved.
        """
        if changes := self.pending():
            raise self.refusal(
                "the directory has changes that are not committed",
                *changes[:10],
                hint=self.command("status"),
            )
        head = self.git.head() or "no branch"
        if head != BRANCH:
            raise self.refusal(
                "what is checked out is not the end of the series: the steps after it"
                " would be lost",
                f"HEAD is on {head}, not on {BRANCH}",
                hint=f"{self.command('checkout', 'series')}; or, if the series is to"
                f" end here, {self.command('checkout', '-B', 'series')}",
            )
        try:
            base = self.git.commit_of(BASE)
        except GitFailed:
            base = "missing"
        if base != self.state.base:
            raise self.refusal(
                "the tag base does not name the base any more: the steps before it"
                " would be lost",
                f"the base is {self.state.base}",
                f"the tag is {base}",
                hint=self.command("tag", "-f", "base", self.state.base),
            )

    def steps(self, project: Project) -> list[StepCommit]:
        """The commits since the base as steps, oldest first.

        Raises:
            SeriesError: a commit cannot be a step.
        """
        patches = read_patches(project, self.state.release)
        commits: dict[str, StepCommit] = {}
        parent = self.state.base
        for entry in self.git.log(parent, "HEAD"):
            try:
                if entry.parents != (parent,):
                    raise ValueError(
                        "the commits since the tag base are not one straight line"
                    )
                slug = STEP_LINE.search(entry.message)
                if slug is None:
                    raise ValueError(
                        "the message lacks a line such as `Step: swa-rope`"
                    )
                if not SLUG.fullmatch(slug[1]):
                    raise ValueError(
                        f"{slug[1]!r} is no slug, which has small letters, digits and"
                        f" single hyphens: write `Step: {_slug(slug[1])}`"
                    )
                if slug[1] in commits:
                    raise ValueError(f"two commits are the step {slug[1]}")
                new = project.patches / slug[1] / (self.state.release + SUFFIX)
                path = patches.get(slug[1], new)
                commits[slug[1]] = self._step(entry, path)
            except ValueError as error:
                problem, *detail = error.args
                subject = entry.message.partition("\n")[0]
                raise self.refusal(
                    problem,
                    f"commit {entry.id[:12]} {subject}",
                    *detail,
                    hint=self.command("rebase", "-i", "base"),
                    kind=SeriesError,
                ) from None
            parent = entry.id
        return list(commits.values())

    def _step(self, entry: LogEntry, path: Path) -> StepCommit:
        """A commit as the step that has the patch `path`.

        Raises:
            ValueError: it cannot be one; the arguments are lines that say why.
        """
        (parent,), git = entry.parents, self.git
        subject, text, trailers = split_text(STEP_LINE.sub("", entry.message))
        if "---" in text.splitlines():
            raise ValueError(
                "a line `---` ends a message in a mail: write another line"
            )
        changes = git.changes(parent, entry.id)
        patched = [each.path for each in changes if each.old or not each.new]
        added = {each.path: each.new for each in changes if each.new and not each.old}
        for name, file in added.items():
            if file.mode != PLAIN:
                raise ValueError(f"{name}: a step may add plain files only ({PLAIN})")
        diff = without_ids(git.diff(parent, entry.id, patched))
        overlay = [name for name in added if not name.startswith(KERNEL_HOME + "/")]
        listed = [name for name in trailers.overlay if name in overlay]
        unlisted = [name for name in overlay if name not in listed]
        trailers = replace(trailers, overlay=(*listed, *unlisted))
        release, slug = self.state.release, path.parent.name
        written = Step(release, slug, path, subject, text, trailers, diff)
        try:
            step = parse_patch(release, path, format_patch(written))
        except SeriesError as error:
            raise ValueError(error.message, *error.detail) from None
        blobs = git.blobs(file.blob for file in added.values()) if added else {}
        contents = {name: blobs[file.blob] for name, file in added.items()}
        problems = step_problems(step)
        problems += [
            f"{name}: this kernel file is generated, or is no module: take it out"
            for name, content in contents.items()
            if name.startswith(KERNEL_HOME + "/") and not _is_kernel(name, content)
        ]
        if not changes:
            problems.append("the commit changes nothing")
        if problems:
            raise ValueError("; ".join(problems))
        return StepCommit(entry.id, entry.tree, step, contents)


def _slug(text: str) -> str:
    """A slug that is like a text."""
    return "-".join(re.findall("[a-z0-9]+", text.lower())) or "swa-rope"


def _is_kernel(path: str, content: bytes) -> bool:
    """Whether a file in the kernels' package is a module as it must be there."""
    name = path.removeprefix(KERNEL_HOME + "/")
    if name == f"{TRITON}.py":
        return content == TRITON_IN_VLLM
    return name.count("/") < 2 and name.endswith(".py")


def apply_to(
    project: Project,
    cache: Cache,
    release: Release,
    directory: Path,
    upto: str | None = None,
) -> Series:
    """Make `directory` a git repository with one commit for the base and one per step.

    It does not depend on the cache: objects are linked or copied. Branch `series` is
    checked out, tag `base` names the base, and `step/<slug>` the commit of each step.

    Args:
        directory: new or empty, or an unchanged result of this function.
        upto: the last step to apply, by its slug, or `base` for none; None for the
            whole series.

    Raises:
        UsageError: `directory` holds something else, or there is no step `upto`.
        StackError: as `trees`. `directory` is then as it was.
    """
    directory = directory.absolute()
    store = Store(cache)
    replaced = replaceable(directory, release.name)
    series = trees(store, project, release, upto=upto)
    whole = upto is None or read_order(project, release.name)[-1:] == [upto]
    state = State(
        release.name, series.base.commit, series.tip.commit, None if whole else upto
    )
    with (replace_dir if replaced else atomic_dir)(directory) as temporary:
        cache.progress(f"writing {release.name} to {directory}")
        fill(store, temporary, state)
        tags = {STEPS + tree.slug: tree.commit for tree in series.steps}
        Checkout.of(temporary).set_refs(tags)
    return series


def start_over(release: str, directory: Path) -> str:
    """The commands that copy the commits of an unusable work repository to a new
    one."""
    return (
        f"xpustack apply {release} --to NEW, then bring your commits along:"
        f" git -C NEW fetch {shlex.quote(str(directory.absolute()))} HEAD,"
        " and git -C NEW cherry-pick each of them"
    )


def fill(store: Store, directory: Path, state: State) -> None:
    """Create a work repository in an empty directory, at the state's tip."""
    git = Checkout.of(directory)
    git.initialize()
    link_objects(store, git)
    git.configure({"core.autocrlf": "false", "core.fileMode": "true"})
    git.set_ref(BASE, state.base)
    git.set_ref(BRANCH, state.tip)
    git.check_out(state.tip)
    Work(git, state).note(state)


def link_objects(store: Store, git: Checkout) -> None:
    """Link or copy the store's objects that a repository lacks; they never change."""
    source = store.cache.objects / "objects"
    with store.cache.lock("objects"):
        for folder, _, names in os.walk(source):
            target = git.directory / "objects" / Path(folder).relative_to(source)
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                if not name.startswith("tmp_"):
                    with suppress(FileExistsError):
                        link_or_copy(Path(folder, name), target / name)


def replaceable(directory: Path, release: str) -> bool:
    """Whether `directory` is an unchanged result of `apply_to`; False if it is new.

    Raises:
        UsageError: it holds files or commits that would be lost.
    """
    if vacant(directory):
        return False
    if not (directory / ".git" / STATE).is_file():
        raise not_ours(directory, release, "apply")
    work = Work.at(directory)
    changes = work.pending(ignored=True)
    state = work.state
    expected = {BRANCH: state.tip, BASE: state.base}
    applied = {entry.id for entry in work.git.log(state.base, state.tip)}
    changes += [
        f"commits: {ref} {commit.id}"
        for ref, commit in work.git.refs().items()
        if commit.id != expected.get(ref)
        and not (ref.startswith(STEPS) and commit.id in applied)
    ]
    if changes:
        raise work.refusal(
            "the directory holds work that applying again would lose",
            *changes[:10],
            hint=f"{command('xpustack', 'save', directory)}, or choose another"
            " directory",
        )
    return True
