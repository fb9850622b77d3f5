# SPDX-License-Identifier: Apache-2.0
"""A stack small enough to build, lint and test in seconds."""

import os
import shutil
import subprocess
import textwrap
from contextlib import closing
from importlib import metadata
from pathlib import Path

from children import TOOL
from fake_stack import FakeStack, git
from sdists import pinned, write_sdist

from stack.base.pin import release_entry
from stack.base.store import Store
from stack.builds.build import backend_server, build, build_version
from stack.builds.installed import Build
from stack.core.cache import Cache
from stack.core.process import Runner
from stack.core.project import Project

HEADER = "# SPDX-License-Identifier: Apache-2.0\n"
VALUE = "vllm/value.py"
SPDX_HOOK = """\
import sys

bad = [name for name in sys.argv[1:] if "SPDX" not in open(name).readline()]
print("\\n".join(["without a header:", *("  " + name for name in bad)]))
sys.exit(bool(bad))
"""
XPU_TXT = """\
numpy
--extra-index-url=https://wheels.example.org/xpu/
torch==2.11.0
vllm_xpu_kernels @ https://example.org/vllm_xpu_kernels-2.11.0-py3-none-any.whl
"""
DOCKERFILE = """\
FROM example/tools:1 AS builder
FROM example/gpu-runtime:2 AS vllm-base
ARG PYTHON_VERSION=3.12
RUN wget https://example.org/driver/libze-gpu.deb && \\
    wget https://example.org/driver/level-zero_1.deb && \\
    wget https://example.org/tools/monitor.deb
ENV LD_LIBRARY_PATH=/opt/venv/lib:/usr/local/lib
FROM vllm-base AS vllm-openai
RUN wget https://example.org/driver/libze-unwanted.deb
RUN uv pip uninstall triton triton-xpu && \\
    uv pip install triton-xpu==2.11.0 && uv pip uninstall oneccl
RUN uv pip install \\
      "intel-sycl-rt==7.1" \\
      "oneccl==8.2; platform_system == 'Linux' and platform_machine == 'x86_64'"
"""
PUBLISHING = """\
docker manifest push "example/vllm-openai-xpu:v${RELEASE_VERSION}"
"""
PLATFORMS = """

class current_platform:
    @staticmethod
    def is_xpu():
        return True
"""
CONFIGURATION = f"""\
exclude: 'vllm/third_party/.*'
repos:
- repo: pinned/ruff
  rev: v{metadata.version("ruff")}
  hooks: [{{id: ruff-check}}, {{id: ruff-format}}]
- repo: pinned/typos
  rev: v{metadata.version("typos")}
  hooks: [{{id: typos}}]
- repo: local
  hooks:
  - id: check-spdx-header
    language: python
    entry: python tools/pre_commit/check_spdx_header.py
    types: [python]
  - id: needs-more
    language: python
    entry: python tools/pre_commit/needs_more.py
    additional_dependencies: [a-package-that-nobody-has]
"""
BASE = {
    ".pre-commit-config.yaml": CONFIGURATION,
    "pyproject.toml": "[tool.ruff.lint]\nselect = ['E', 'F']\n",
    "setup.py": textwrap.dedent(
        """\
        import os
        from pathlib import Path

        from setuptools import find_namespace_packages, setup

        assert os.environ["VLLM_TARGET_DEVICE"] == "xpu"
        version = os.environ["VLLM_VERSION_OVERRIDE"]
        Path("vllm/_version.py").write_text(f"version = {version!r}")
        packages = find_namespace_packages(include=["vllm", "vllm.*"])
        setup(name="vllm", version=version, packages=packages)
        """
    ),
    "requirements/xpu.txt": XPU_TXT,
    "docker/Dockerfile.xpu": DOCKERFILE,
    ".buildkite/scripts/publish-release-images.sh": PUBLISHING,
    "tools/pre_commit/check_spdx_header.py": SPDX_HOOK,
    "vllm/__init__.py": HEADER,
    "vllm/platforms.py": HEADER + PLATFORMS,
    VALUE: HEADER + "import os\n\nVALUE = 1\nOLD = 1\n",
}
TWO = BASE[VALUE].replace("VALUE = 1", "VALUE = 2")
PROVES = "from vllm import value\n\n\ndef test_value():\n    assert value.VALUE == 2\n"
EMULATION = """\
import os

assert os.environ["EMULATED_XPU_KERNELS"] == "2.11.0"
"""


class TinyStack(FakeStack):
    """Releases v1.0 and v2.0, each with one step `raise-value`, proven by
    `tests/steps/test_value.py`, which fails before with `assert 1 == 2`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = Project(root / "project")
        self.cache = Cache(root / "cache", offline=True)
        self.write("releases.toml", "")
        for version in ("1.0", "2.0"):
            self.publish(version, {})
        self.write("standins/emulated_xpu/__init__.py", "")
        self.write("standins/emulated_xpu/pytest_plugin.py", EMULATION)
        self.write("standins/emulated_xpu/cpu_pytest_plugin.py", "")
        self.write("standins/emulated_xpu/ahead.py", "import vllm.value\n")
        self.write("kernels/__init__.py", "")
        self.write("tests/steps/test_value.py", PROVES)

    def publish(self, version: str, edits: dict[str, str]) -> None:
        """Pin a newer release, whose archive is in the cache: `BASE` with edits."""
        files = {**BASE, "VERSION": version, **edits}
        sdist = write_sdist(
            self.root / f"vllm-{version}.tar.gz",
            {name: text.encode() for name, text in files.items()},
        )
        release = pinned(sdist)
        place = self.cache.sdists / release.sha256 / sdist.name
        place.parent.mkdir(parents=True)
        shutil.copyfile(sdist, place)
        with open(self.project.releases_file, "a") as file:
            file.write("\n" + release_entry(release))

    def add(
        self,
        slug: str,
        edits: dict[str, str | None],
        release: str = "v1.0",
        test: str = "tests/steps/test_value.py",
        failure: str = r"assert 1 == 2",
        kernels: str | None = None,
    ) -> None:
        """Add a step at the end of a series; a text of None removes the file."""
        work = self.apply(f"add-{release}-{slug}", release)
        for path, text in edits.items():
            if text is None:
                (work / path).unlink()
            else:
                (work / path).parent.mkdir(parents=True, exist_ok=True)
                (work / path).write_text(text)
        git(work, "add", *edits)
        message = (
            f"[XPU] Do {slug}\n\nWhy.\n\nUpstream-Status: Pending\nRemoval: never\n"
            f"Test: {test}\nFails-before: {failure}\n"
            + (f"Kernels: {kernels}\n" if kernels else "")
            + f"Step: {slug}\n"
        )
        git(work, "commit", "-q", "-F", "-", text=message)
        self.save(work)
        shutil.rmtree(work)

    def builds(self, runner: Runner) -> list[Build]:
        """Every tree of v1.0, built."""
        series = self.trees()
        last = len(series) - 1
        with closing(backend_server(runner)) as server:
            return [
                build(server, Store(self.cache), tree, build_version(tree, last))
                for tree in series
            ]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command line, as a user of this stack runs it."""
        return subprocess.run(
            [*TOOL, *words],
            cwd=self.project.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def environment(self) -> dict[str, str]:
        root = str(Path(__file__).parents[1])
        return {
            **os.environ,
            "PYTHONPATH": root,
            "XPUSTACK_CACHE": str(self.cache.root),
        }
