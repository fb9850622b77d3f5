# SPDX-License-Identifier: Apache-2.0
"""The trees of a series in upstream's form: one commit per step.

Each is its step's tested tree with the kernels in upstream's form and the tests of the
steps so far: a request's own in upstream's files, else the step's test. Branches with
one of the latter stand on one first commit, the same below all: what these tests of the
release share, and the CI jobs that run them. Commits carry the exporter's name and
sign-off in place of this stack's trailers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stack.base.store import Store, Writer
from stack.core import history
from stack.core.errors import UsageError
from stack.core.process import Runner
from stack.core.project import Project
from stack.core.repository import Repository, TreeEntry
from stack.series.tree import BaseTree, Series, Step, StepTree
from stack.steptest.material import Support, material_of
from stack.upstream.ci import CI_FILES, ci_files
from stack.upstream.form import (
    ANY_PLATFORM,
    FIRST_MESSAGE,
    is_kernel,
    is_shim,
    kernel,
    package,
    tidy,
)
from stack.upstream.notes import read_notes
from stack.upstream.request_tests import RequestTests, read_request_tests

TESTS = "tests/steps"
_PERSON = re.compile(r"([^<>\n]*[^<>\s]) <([^<>\s]+@[^<>\s]+)>")


@dataclass(frozen=True)
class Person:
    """The person who exports, and thereby certifies the origin of every commit."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"

    @classmethod
    def find(cls, project: Project, author: str | None = None) -> "Person":
        """From `Name <address>`, else from git's configuration.

        Raises:
            UsageError: neither gives a name and address.
        """
        if author is not None:
            match = _PERSON.fullmatch(author)
            if match is None:
                raise UsageError(
                    f"{author!r} is not `Name <address>`",
                    hint="xpustack export RELEASE --author 'Name <address>'",
                )
            return cls(match[1], match[2])
        name = history.git_setting(project, "user.name")
        email = history.git_setting(project, "user.email")
        if not name or not email:
            raise UsageError(
                "git has no user.name and user.email to sign commits off with",
                path=project.root,
                hint="git config user.name NAME; git config user.email ADDRESS,"
                " or --author 'Name <address>'",
            )
        return cls(name, email)


def upstream_trees(
    project: Project,
    store: Store,
    forms: "UpstreamForms",
    checked: Series,
    parent: str,
    person: Person,
    assistant: str,
) -> Series:
    """The base and the exported tree of each step.

    Args:
        checked: the tested trees of the series.
        parent: the commit that the first exported one follows; it has the base's tree
            and need not be in the store.
        assistant: the AI tool that commits name as co-author.
    """
    base = BaseTree(checked.base.release, parent, checked.base.tree_id)
    with store.writing() as writer, store.cache.scratch() as scratch:
        on_first = any(tree.slug in forms.tests for tree in checked.steps)
        if on_first:
            base = forms.first(writer, base, person, assistant, scratch)
        series = Series(base)
        for tree in checked.steps:
            before = series.tip
            writer.read_tree(tree.tree_id)
            forms.put(writer, tree, scratch, on_first)
            tree_id = writer.write_tree()
            text = message(tree.step, person, assistant)
            date = history.last_change_date(project, tree.step.path)
            commit = writer.commit_tree(tree_id, before.commit, text, str(person), date)
            changes = writer.changes(before.tree_id, tree_id)
            changed = tuple(sorted(change.path for change in changes))
            added = tuple(
                sorted(change.path for change in changes if change.old is None)
            )
            exported = StepTree(tree.step, commit, tree_id, before, changed, added)
            series = series.followed_by(exported)
    return series


def message(step: Step, person: Person, assistant: str) -> str:
    """A commit message for upstream: with a sign-off, without this stack's trailers."""
    return _signed([step.subject, step.message], person, assistant)


def _signed(parts: Iterable[str], person: Person, assistant: str) -> str:
    trailers = f"Co-authored-by: {assistant}\nSigned-off-by: {person}\n"
    return "\n\n".join(part for part in (*parts, trailers) if part)


@dataclass
class UpstreamForms:
    """Every file of some series in upstream's form, by its path in the tree.

    `requests` are the requests' own tests by step. Of requests without such the steps'
    tests are sent: `shared` are the files that these read beside their modules, `tests`
    maps a step to the other files of its test, `jobs` has the CI files with the jobs,
    and `date` is the first commit's.
    """

    requests: Mapping[str, RequestTests]
    files: Mapping[str, bytes]
    tests: Mapping[str, tuple[str, ...]]
    shared: frozenset[str]
    jobs: Mapping[str, str]
    date: str

    @classmethod
    def of(
        cls, project: Project, store: Store, whole: Series, every: Sequence[Series]
    ) -> "UpstreamForms":
        """The files of series on one base.

        Args:
            whole: the release's series, whose tests share what the first commit brings.

        Raises:
            SeriesError: a file cannot be brought into upstream's form.
        """
        base, support = every[0].base, Support.of(project)
        read = {
            tree.slug: read_request_tests(project, tree.slug) for tree in whole.steps
        }
        requests = {slug: tests for slug, tests in read.items() if tests is not None}
        asked = set(requests)
        for tree in whole.steps:
            group = {tree.slug, *read_notes(project, tree.slug).along}
            asked |= group if group & requests.keys() else set()
        others = [tree for tree in whole.steps if tree.slug not in asked]
        packages = {
            tree.slug: package(material_of(support, tree.step).tests) for tree in others
        }
        files = {
            path: text for made in packages.values() for path, text in made.items()
        }
        sent = [tree for tree in others if tree.step.trailers.for_upstream]
        shared = frozenset(
            path
            for tree in sent
            for path in packages[tree.slug]
            if not PurePosixPath(path).name.startswith("test_")
        )
        tests = {
            slug: tuple(path for path in made if path not in shared)
            for slug, made in packages.items()
        }
        entries = store.git.files(base.tree_id)
        for tip in {series.tip.tree_id for series in every}:
            entries |= store.git.files(tip)
        kernels, configuration, jobs = _read(store.git, entries)
        changed = {path for tree in sent for path in tree.changed}
        on_cpu = any(ANY_PLATFORM in files[path] for path in files.keys() - shared)
        files |= {path: kernel(content) for path, content in kernels.items()}
        with store.cache.scratch() as scratch:
            files = tidy(
                files,
                configuration,
                scratch,
                Runner(),
                release=base.release.name,
            )
        date = history.last_change_date(project, project.root / TESTS)
        jobs = ci_files(jobs, changed, on_cpu)
        return cls(requests, files, tests, shared, jobs, date)

    @property
    def common(self) -> frozenset[str]:
        """What the first commit brings."""
        return self.shared | self.jobs.keys()

    def first(
        self,
        writer: Writer,
        base: BaseTree,
        person: Person,
        assistant: str,
        scratch: Path,
    ) -> BaseTree:
        """The first commit on a base; the base itself where that has it all."""
        writer.read_tree(base.tree_id)
        entries = writer.files(base.tree_id, self.shared)
        self._add(writer, entries, self.shared, scratch)
        self._add_jobs(writer, scratch)
        tree_id = writer.write_tree()
        if tree_id == base.tree_id:
            return base
        text = _signed([FIRST_MESSAGE], person, assistant)
        by = str(person), self.date
        commit = writer.commit_tree(tree_id, base.commit, text, *by)
        return BaseTree(base.release, commit, tree_id)

    def put(
        self, writer: Writer, tree: StepTree, scratch: Path, on_first: bool
    ) -> None:
        """Convert the private index, which holds `tree`, to upstream's form.

        Args:
            on_first: whether it stands on the first commit.
        """
        entries = writer.files(tree.tree_id)
        paths = {path for path in self.files if path in entries and is_kernel(path)}
        for applied in reversed(tree.applied):
            if (request := self.requests.get(applied.slug)) is not None:
                request.apply(writer, tree.tree_id, tree.release.name)
            paths |= set(self.tests.get(applied.slug, ()))
        self._add(writer, entries, paths | self.shared if on_first else paths, scratch)
        if on_first:
            self._add_jobs(writer, scratch)
        writer.remove(path for path in entries if is_shim(path))

    def _add(
        self,
        writer: Writer,
        entries: Mapping[str, TreeEntry],
        paths: Iterable[str],
        scratch: Path,
    ) -> None:
        """Add files. The base's own empty package files stay as they are."""
        changes = {
            path: self.files[path]
            for path in paths
            if not (path.endswith("/__init__.py") and path in entries)
            or is_kernel(path)
        }
        writer.add(changes, scratch)

    def _add_jobs(self, writer: Writer, scratch: Path) -> None:
        jobs = {path: text.encode() for path, text in self.jobs.items()}
        writer.add(jobs, scratch)


def _read(
    git: Repository, entries: Mapping[str, TreeEntry]
) -> tuple[dict[str, bytes], bytes, dict[str, str]]:
    """The kernels without the shim, ruff's configuration, and the CI files."""
    paths = [path for path in entries if is_kernel(path) and not is_shim(path)]
    others = [path for path in ("pyproject.toml", *CI_FILES) if path in entries]
    blobs = git.blobs(entries[path].blob for path in [*paths, *others])
    contents = {path: blobs[entries[path].blob] for path in [*paths, *others]}
    kernels = {path: contents[path] for path in paths}
    jobs = {path: contents[path].decode() for path in CI_FILES if path in contents}
    return kernels, contents.get("pyproject.toml", b""), jobs
