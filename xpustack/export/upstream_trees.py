# SPDX-License-Identifier: Apache-2.0
"""The trees of a series as upstream would get them: one commit a step.

Each is the checked tree of its step with the kernels in upstream's form, the
tests of the steps so far, and the CI job that runs them. Commits carry the
exporter's name and sign-off in place of this stack's trailers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xpustack.base.store import Store, Writer
from xpustack.core import history
from xpustack.core.errors import UsageError
from xpustack.core.process import Runner
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.core.repository import TreeEntry
from xpustack.export.upstream_form import (
    TEST_HOME,
    is_kernel,
    is_shim,
    kernel,
    package,
    tidy,
)
from xpustack.series.patch import Step
from xpustack.series.tree import Series, StepTree
from xpustack.steptest.step_test import Support, material_of

CI_JOBS = ".buildkite/intel_jobs/kernels_intel.yaml"
_PERSON = re.compile(r"([^<>\n]*[^<>\s]) <([^<>\s]+@[^<>\s]+)>")
_BLOCK = re.compile(r"^- label:.*?(?=^- label:|\Z)", re.MULTILINE | re.DOTALL)
_SOURCES = ("vllm/models/deepseek_v4/xpu", "vllm/v1/attention/ops/xpu_dsv4", TEST_HOME)


@dataclass(frozen=True)
class Person:
    """Who exports, and thereby certifies the origin of every commit."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"

    @classmethod
    def find(cls, project: Project, author: str | None = None) -> "Person":
        """From `Name <address>`, else from git's configuration.

        Raises:
            UsageError: neither names a person.
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
                "git knows no name and address to sign commits off with",
                path=project.root,
                hint="git config user.name NAME; git config user.email ADDRESS,"
                " or --author 'Name <address>'",
            )
        return cls(name, email)


def upstream_trees(
    project: Project,
    store: Store,
    made: Series,
    person: Person,
    assistant: str,
    progress: Progress = silent,
) -> Series:
    """The base and the exported tree of each step.

    Args:
        made: the checked trees of the series.
        assistant: the AI tool that commits name as co-author.

    Raises:
        SeriesError: a file cannot be brought into upstream's form.
    """
    found = Series(made.base)
    with store.writing(progress) as writer, store.cache.scratch() as scratch:
        forms = _Forms.of(project, writer, made, scratch)
        for tree in made.steps:
            progress(f"exporting {tree.slug}")
            before = found.tip
            writer.read_tree(tree.tree_id)
            forms.put(writer, tree, scratch)
            tree_id = writer.write_tree()
            text = message(tree.step, person, assistant)
            date = history.last_change_date(project, tree.step.path)
            commit = writer.commit_by(str(person), date, tree_id, before.commit, text)
            changes = writer.changes(before.commit, commit)
            changed = tuple(sorted(one.path for one in changes))
            added = tuple(sorted(one.path for one in changes if one.old is None))
            exported = StepTree(tree.step, commit, tree_id, before, changed, added)
            found = found.followed_by(exported)
    return found


def message(step: Step, person: Person, assistant: str) -> str:
    """A commit message for upstream: no trailer of ours, a sign-off."""
    trailers = f"Co-authored-by: {assistant}\nSigned-off-by: {person}\n"
    parts = [step.subject, step.message, trailers]
    return "\n\n".join(part for part in parts if part)


def ci_job(jobs: str) -> str | None:
    """A CI file of the base with one more job, which runs the exported tests. The
    file's first job is its model; None if that is not the one that all releases
    so far have."""
    model = _BLOCK.search(jobs)
    if model is None:
        return None
    block, named = re.subn(r"vLLM IR Tests", "DeepSeek-V4", model[0])
    block = re.sub(r"(?m)^(  key: ).*", r"\1deepseek-v4-xpu", block)
    sources = "".join(f"    - {path}\n" for path in _SOURCES)
    block, dependencies = re.subn(
        r"(?m)(^  source_file_dependencies:\n)(?:^ +- .*\n)+", rf"\1{sources}", block
    )
    tests = TEST_HOME.removeprefix("tests/")
    block, commands = re.subn(
        r"(?s)pytest -v -s .*'\n*\Z", f"pytest -v -s {tests}'\n", block
    )
    if not (named and dependencies and commands):
        return None
    return f"{jobs.rstrip()}\n\n{block}"


@dataclass
class _Forms:
    """Every file of the series in upstream's form, by its path in the tree.

    `tests` maps a step to the files of its test.
    """

    files: Mapping[str, bytes]
    tests: Mapping[str, tuple[str, ...]]
    jobs: bytes | None

    @classmethod
    def of(
        cls, project: Project, writer: Writer, made: Series, scratch: Path
    ) -> "_Forms":
        files: dict[str, bytes] = {}
        tests: dict[str, tuple[str, ...]] = {}
        support = Support.of(project)
        for tree in made.steps:
            own = package(material_of(support, tree.step).tests)
            files |= own
            tests[tree.slug] = tuple(own)
        writer.read_tree(made.tip.tree_id)
        entries = writer.entries()
        kernels, configuration, jobs = _read(writer, entries)
        files |= {path: kernel(content) for path, content in kernels.items()}
        folder = scratch / "form"
        folder.mkdir()
        files = tidy(
            files,
            configuration,
            (path for path in entries if path.endswith(".py")),
            folder,
            Runner(),
            release=made.base.release.name,
        )
        wired = ci_job(jobs.decode()) if jobs else None
        return cls(files, tests, wired.encode() if wired else None)

    def put(self, writer: Writer, tree: StepTree, scratch: Path) -> None:
        """Bring the private index, which holds `tree`, into upstream's form."""
        entries = writer.entries()
        wanted = {path for path in self.files if path in entries and is_kernel(path)}
        for one in tree.applied:
            wanted |= set(self.tests[one.slug])
        # An empty package file that the base has stays as it is.
        put = {
            path: self.files[path]
            for path in wanted
            if not (path.endswith("/__init__.py") and path in entries)
            or is_kernel(path)
        }
        if self.jobs is not None:
            put[CI_JOBS] = self.jobs
        writer.add(put, scratch)
        writer.remove(path for path in entries if is_shim(path))


def _read(
    writer: Writer, entries: Mapping[str, TreeEntry]
) -> tuple[dict[str, bytes], bytes, bytes]:
    """A tree's kernels without the shim, ruff's configuration, and the CI jobs."""
    paths = [path for path in entries if is_kernel(path) and not is_shim(path)]
    others = [path for path in ("pyproject.toml", CI_JOBS) if path in entries]
    blobs = writer.blobs(entries[path].blob for path in [*paths, *others])
    contents = {path: blobs[entries[path].blob] for path in [*paths, *others]}
    kernels = {path: contents[path] for path in paths}
    return kernels, contents.get("pyproject.toml", b""), contents.get(CI_JOBS, b"")
