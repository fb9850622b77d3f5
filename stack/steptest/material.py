# SPDX-License-Identifier: Apache-2.0
"""The files of a step test's run: the module with what it imports, and what every step
test needs beside it."""

import functools
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stack.core import fingerprint
from stack.core.errors import SeriesError
from stack.core.files import closure
from stack.core.project import Project
from stack.forks.program import ANY
from stack.series.tree import Step

PLUGIN = "xpustack_outcomes"
"""The pytest plugin that writes a run's outcomes, on the path of every run."""
ENTRY_POINTS = """\
[vllm.platform_plugins]
emulated_xpu = standins.emulated_xpu.plugin:register
plain_cpu = standins.emulated_xpu.plugin:register_cpu
plain_cuda = standins.emulated_xpu.plugin:register_cuda
"""
"""The last two are known to these runs alone: vLLM refuses to choose between two
installed platforms."""
_COMPILED = "pytest.mark.compiled"
_ANY_PLATFORM = "pytest.mark.any_platform"


@dataclass(frozen=True)
class Support:
    """What step tests of a project may read beside their own files: the emulation, and
    the kernels that the emulation patches. Read once per run of checks. A run says what
    it read of them, and its result counts while that is as it was."""

    project: Project
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    _materials: dict[Path, "Material"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def material(self, module: Path, *, now: bool = False) -> "Material":
        """What a run of the test module needs, as it was when somebody last asked for
        it as it is `now`, or first: releases share their modules."""
        if now or module not in self._materials:
            # pytest reads the markers there, without an import.
            roots = [module, module.with_name("conftest.py")]
            files = closure(roots, module.parent)
            self._materials[module] = Material(module.name, files, self)
        return self._materials[module]

    @functools.cached_property
    def digest(self) -> str:
        """One digest of all files."""
        return fingerprint.digest(**self.digests)

    def read_by(self, paths: Iterable[str], folder: Path) -> list[str]:
        """The names of the files that a run read, from the paths that it opened, where
        `folder` has the files."""
        opened = set(paths)
        if ANY in opened:
            return sorted(self.files)
        places = {str(folder / name): name for name in self.files}
        return sorted(places[path] for path in opened & places.keys())

    def has(self, reads: Mapping[str, str]) -> bool:
        """Whether the files that a run read are as it read them."""
        return all(self.digests.get(name) == sha for name, sha in reads.items())

    def lay_out(self, folder: Path) -> None:
        """Write the files, the plugins' metadata, and a folder for what imports that
        runs share write."""
        _copy({folder / name: path for name, path in self.files.items()})
        _copy({folder / f"{PLUGIN}.py": Path(__file__).with_name("outcomes.py")})
        (folder / "imports").mkdir()
        distribution = folder / "emulated_xpu-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: emulated-xpu\nVersion: 0\n"
        )
        (distribution / "entry_points.txt").write_text(ENTRY_POINTS)

    @classmethod
    def of(cls, project: Project) -> "Support":
        """The project's files as they are now."""
        files = {
            name: file
            for folder in (project.emulation, project.kernels)
            for name, file in fingerprint.folder_files(folder).items()
        }
        return cls(project, files, fingerprint.file_digests(files))


@dataclass(frozen=True)
class Material:
    """The files of a run by their names in the run's folder: the test module with what
    it imports beside it, and what every step test needs."""

    module: str
    tests: Mapping[str, Path]
    support: Support

    def lay_out(self, folder: Path) -> None:
        """Write the test module and what it imports, with a configuration of pytest."""
        _copy({folder / name: path for name, path in self.tests.items()})
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")

    @property
    def compiled(self) -> bool:
        """Whether the module has the marker `compiled`: it tests what torch.compile
        makes. Other modules run without compilation, in a fraction of the time."""
        return _COMPILED in self.tests[self.module].read_text("utf-8")

    @property
    def any_platform(self) -> bool:
        """Whether the module, or a file that it imports tests from, has a test that
        needs no XPU."""
        return any(
            _ANY_PLATFORM in path.read_text("utf-8") for path in self.tests.values()
        )

    @functools.cached_property
    def digest(self) -> str:
        return fingerprint.digest(
            module=self.module,
            tests=fingerprint.files_digest(self.tests),
        )


def material_of(support: Support, step: Step) -> Material:
    """Collect what the step's test needs.

    Raises:
        SeriesError: the step names no test module, or one that does not exist.
    """
    root = support.project.root
    path = root / step.trailers.test if step.trailers.test else None
    if path is None or not path.is_file():
        raise SeriesError(
            "the step's test module does not exist" if path else "no trailer Test",
            release=step.release,
            step=step.slug,
            path=path or step.path,
            hint="xpustack check --static",
        )
    return support.material(path)


def _copy(sources: Mapping[Path, Path]) -> None:
    for target, path in sources.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
