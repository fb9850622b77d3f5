# SPDX-License-Identifier: Apache-2.0
"""A tiny project for the tests: two small releases, their archives, a cache."""

import hashlib
import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Self

from stack.base import releases
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.project import Project
from stack.series.apply import trees
from stack.series.overlay import TRITON_IN_VLLM
from stack.series.patch import load_series
from stack.series.recorded import format_trees, trees_file
from stack.series.save import save
from stack.series.tree import KERNEL_HOME, Series, Tree
from stack.series.worktree import apply_to

ATTENTION = "".join(f"attention line {number}\n" for number in range(1, 41))
BASE = {
    "PKG-INFO": "Version: 1\n",
    ".gitignore": "_version.py\n*.log\n",
    ".gitattributes": "*.py text eol=crlf\n*.txt -diff\n",
    "vllm/__init__.py": "",
    "vllm/_version.py": "version = 1\n",
    "vllm/attention.py": ATTENTION,
    "vllm/rope.py": "".join(f"rope line {number}\n" for number in range(1, 21)),
    "vllm/windows.py": "one\r\ntwo\r\n",
    "vllm/no_end.txt": "no line feed at the end",
}
TRAILERS = """\
Upstream-Status: Pending
Removal: when upstream has it
Test: tests/steps/test_any.py
Fails-before: assert .*
"""


class FakeStack:
    """A project at `root/project` with releases v1.0 and v2.0, and a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = Project(root / "project")
        self.cache = Cache(root / "cache", offline=True)
        project = self.project.root
        project.mkdir(parents=True)
        self.project.releases_file.touch()
        for version in ("1.0", "2.0"):
            self.publish(version, {})
        self.write("kernels/xpu_dsv4/__init__.py", '"""Kernels."""\n')
        self.write("kernels/xpu_dsv4/_triton.py", "import triton\n")
        self.write("kernels/xpu_dsv4/_launch.py", "OPTIONS = 1\n")
        self.write(
            "kernels/xpu_dsv4/decode.py",
            "from ._launch import OPTIONS\nfrom ._triton import triton\n",
        )
        self.write("kernels/xpu_dsv4/kv/__init__.py", '"""The cache."""\n')
        self.write("kernels/xpu_dsv4/kv/gather.py", "from .. import _launch\n")
        self.write("tests/steps/test_any.py", "def test_any(): pass\n")

    def publish(self, version: str, edits: dict[str, str]) -> None:
        """Pin a newer release, whose archive is in the cache: `BASE` with edits."""
        name = f"vllm-{version}.tar.gz"
        archive = _sdist(f"vllm-{version}", {**BASE, "VERSION": version, **edits})
        sha256 = hashlib.sha256(archive).hexdigest()
        place = self.cache.sdists / sha256 / name
        place.parent.mkdir(parents=True)
        place.write_bytes(archive)
        pin = '{ version = "1", file = "requirements/xpu.txt" }'
        with open(self.project.releases_file, "a") as file:
            file.write(
                f'\n[[release]]\nversion = "{version}"\nsdist = "{name}"\n'
                f'sha256 = "{sha256}"\nrevision = 1\n'
                f"torch = {pin}\ntriton = {pin}\nxpu_kernels = {pin}\n"
            )

    @classmethod
    def at(cls, root: Path) -> Self:
        """The stack that lies at `root` already."""
        stack = cls.__new__(cls)
        stack.root = root
        stack.project = Project(root / "project")
        stack.cache = Cache(root / "cache", offline=True)
        return stack

    def copy(self, root: Path) -> Self:
        """A copy of the stack and of its cache, to be changed."""
        shutil.copytree(self.root, root, symlinks=True, dirs_exist_ok=True)
        return self.at(root)

    @property
    def releases(self) -> releases.Releases:
        return releases.load(self.project)

    @property
    def release(self) -> Release:
        return self.releases["v1.0"]

    def write(self, path: str, text: str) -> Path:
        target = self.project.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
        return target

    def patch(self, slug: str, release: str = "v1.0") -> Path:
        """The patch that a series names for a step, or would if it had the step."""
        order = self.project.series_dir(release) / "series"
        text = order.read_text(errors="replace") if order.is_file() else ""
        own = f"{slug}/{release}.patch"
        lines = text.splitlines()
        name = next((line for line in lines if line.startswith(f"{slug}/")), own)
        return self.project.patches / name

    def series(self, release: str = "v1.0") -> Series:
        return trees(Store(self.cache), self.project, self.releases[release])

    def trees(self, release: str = "v1.0") -> list[Tree]:
        return list(self.series(release).trees)

    def apply(self, name: str = "work", release: str = "v1.0", **options) -> Path:
        directory = self.root / name
        apply_to(self.project, self.cache, self.releases[release], directory, **options)
        return directory

    def save(
        self,
        directory: Path,
        dry_run: bool = False,
        drop: tuple[str, ...] = (),
        **options,
    ) -> list[str]:
        stale = save(self.project, self.cache, directory, dry_run, drop=drop, **options)
        return [f"{file.kind} {file.path}" for file in stale]

    def step(
        self,
        slug: str,
        edits: dict[str, str],
        trailers: str = "",
        release: str = "v1.0",
    ) -> None:
        """Add a step at the end of a series, the way a maintainer would."""
        directory = self.apply(f"step-{release}-{slug}", release)
        commit(directory, slug, edits, trailers)
        self.save(directory)
        shutil.rmtree(directory)

    def three_steps(self, release: str = "v1.0") -> None:
        """`first` and `second` edit one file; `third` brings overlay and kernel."""
        self.step("first", {"vllm/attention.py": edited(ATTENTION, 5)}, "", release)
        both = edited(edited(ATTENTION, 5), 7)
        self.step("second", {"vllm/attention.py": both}, "", release)
        kernels = {
            f"vllm/model_executor/kernels/xpu_dsv4/{path.name}": path.read_text()
            for path in (self.project.kernels / "xpu_dsv4").glob("*.py")
            if path.name in ("__init__.py", "_launch.py", "decode.py")
        }
        self.step(
            "third",
            {
                "vllm/xpu/layer.py": "LAYER = 1\n",
                f"{KERNEL_HOME}/_triton.py": TRITON_IN_VLLM.decode(),
                "vllm/rope.py": edited(BASE["vllm/rope.py"], 3),
                **kernels,
            },
            "Kernels: decode\n",
            release,
        )

    def split(self, slug: str, release: str) -> Path:
        """Give a release a variant of its own, with the text that it shared."""
        shared = self.patch(slug, release)
        own = shared.with_name(f"{release}.patch")
        own.write_bytes(shared.read_bytes())
        order = self.project.series_dir(release) / "series"
        line = f"{slug}/{shared.name}\n"
        order.write_text(order.read_text().replace(line, f"{slug}/{own.name}\n"))
        return own

    def rederive(self) -> None:
        """Record the trees of every release, as after an edit by hand."""
        for release in self.releases:
            series = trees(Store(self.cache), self.project, release, recorded=False)
            place = trees_file(self.project, release.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(format_trees(series.steps))

    def contents(self) -> dict[str, bytes]:
        """Every file of the project, by its relative path."""
        root = self.project.root
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def slugs(self, release: str = "v1.0") -> list[str]:
        return [step.slug for step in load_series(self.project, release)]


def edited(text: str, line: int, note: str = "changed") -> str:
    """`text` with one line (from 1) changed."""
    lines = text.splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].rstrip("\n") + f" {note}\n"
    return "".join(lines)


def git(directory: Path, *arguments: str, text: str | None = None) -> str:
    """Run git as a person with a configuration of their own would."""
    done = subprocess.run(
        ["git", "-c", "user.name=Me", "-c", "user.email=me@localhost", *arguments],
        cwd=directory,
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def message(slug: str, trailers: str = "") -> str:
    return f"[XPU][DSv4] Do {slug}\n\nWhy {slug}.\n\n{TRAILERS}{trailers}Step: {slug}\n"


def commit(
    directory: Path, slug: str, edits: dict[str, str], trailers: str = ""
) -> None:
    """Write files into a work repository and commit them as one step."""
    for path, text in edits.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(text.encode())
    git(directory, "add", "-f", *edits)
    git(directory, "commit", "-q", "-F", "-", text=message(slug, trailers))


def _sdist(top: str, files: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{top}/{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
        script = tarfile.TarInfo(f"{top}/run.sh")
        script.mode = 0o755
        tar.addfile(script)
        link = tarfile.TarInfo(f"{top}/README")
        link.type, link.linkname = tarfile.SYMTYPE, "run.sh"
        tar.addfile(link)
    return stream.getvalue()
