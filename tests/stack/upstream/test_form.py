# SPDX-License-Identifier: Apache-2.0
"""Upstream's form of kernels, tests, CI jobs and descriptions."""

from pathlib import Path

import pytest
import yaml
from exports import JOBS, TEMPLATE

from stack.core.errors import SeriesError
from stack.core.process import Runner
from stack.upstream import ci
from stack.upstream.form import TEST_HOME, kernel, package, tidy
from stack.upstream.texts import Template

KERNEL = b"""\
import torch

from ._launch import launch_options
from ._triton import tl, triton

__all__ = ["launch_options", "tl", "torch", "triton"]
"""
PYPROJECT = b"[tool.ruff.lint]\nselect = ['I']\n"


def test_a_kernel_takes_triton_from_vllm(tmp_path: Path) -> None:
    path = "vllm/model_executor/kernels/xpu_dsv4/gather.py"
    form = {path: kernel(KERNEL)}
    done = tidy(form, PYPROJECT, tmp_path, Runner(), release="v1.0")
    assert done[path].decode().splitlines()[:5] == [
        "import torch",
        "",
        "from vllm.triton_utils import tl, triton",
        "",
        "from ._launch import launch_options",
    ]


def test_a_file_that_ruff_would_rewrite_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SeriesError, match="ruff refuses"):
        tidy({"a.py": b"def (\n"}, PYPROJECT, tmp_path, Runner(), release="v1.0")


def test_siblings_are_imported_from_the_package(tmp_path: Path) -> None:
    files = {
        "conftest.py": "",
        "layout.py": "import torch\n",
        "helpers/__init__.py": "",
        "helpers/batch.py": "from . import layer\nfrom .layer import LAYER\n",
        "test_a.py": "import layout\nfrom layout import one\nimport layout as other\n"
        "from helpers import batch\nfrom helpers.batch import BATCH\n"
        "def test():\n    import layout\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = package({name: tmp_path / name for name in files})
    assert found[f"{TEST_HOME}/test_a.py"].decode() == (
        "from . import layout\nfrom .layout import one\n"
        "from . import layout as other\n"
        "from .helpers import batch\nfrom .helpers.batch import BATCH\n"
        "def test():\n    from . import layout\n"
    )
    helper = found[f"{TEST_HOME}/helpers/batch.py"].decode()
    assert helper == files["helpers/batch.py"]
    assert b"is_xpu()" in found[f"{TEST_HOME}/conftest.py"]


CPU_JOBS = """\
group: CPU
steps:
- label: CPU-Kernel Tests
  source_file_dependencies:
  - csrc/cpu/
  commands:
    - |
      bash run.sh
"""
BASE = {ci.XPU_JOBS: JOBS, ci.CPU_JOBS: CPU_JOBS}
CHANGED = ["vllm/b.py", "vllm/model_executor/kernels/xpu_dsv4/one.py", "docs/a.md"]


def steps(texts: dict[str, str], path: str) -> list[dict[str, object]]:
    return yaml.safe_load(texts[path])["steps"]


def test_the_tests_get_a_job_of_their_own() -> None:
    new = ci.ci_files(BASE, CHANGED, on_cpu=True)
    first, job = steps(new, ci.XPU_JOBS)
    assert [first] == steps(BASE, ci.XPU_JOBS)
    assert job["label"] == ":intel: (BMG) DeepSeek-V4"
    assert job["key"] == "deepseek-v4-xpu"
    assert job["commands"] == [
        "bash run.sh 'cd tests && pytest -v -s models/deepseek_v4/xpu'"
    ]
    first, on_cpu = steps(new, ci.CPU_JOBS)
    assert [first] == steps(BASE, ci.CPU_JOBS)
    (command,) = on_cpu["commands"]
    assert f"-m any_platform {TEST_HOME}" in command
    kernels = "vllm/model_executor/kernels/xpu_dsv4"
    for each in (job, on_cpu):
        assert each["source_file_dependencies"] == [TEST_HOME, "vllm/b.py", kernels]
    assert list(ci.ci_files(BASE, CHANGED, on_cpu=False)) == [ci.XPU_JOBS]


def test_the_second_request_finds_the_job_of_the_first() -> None:
    first = ci.ci_files(BASE, CHANGED, on_cpu=True)
    second = ci.ci_files(first, ["vllm/a.py"], on_cpu=True)
    for path in ci.CI_FILES:
        before, after = steps(first, path), steps(second, path)
        assert len(before) == len(after) == 2
        named = [*before[1].pop("source_file_dependencies"), "vllm/a.py"]
        assert sorted(named) == after[1].pop("source_file_dependencies")
        assert before == after


def test_jobs_of_an_unknown_form_stay_as_they_are() -> None:
    unknown = {**BASE, ci.XPU_JOBS: "steps: []\n"}
    assert list(ci.ci_files(unknown, CHANGED, on_cpu=True)) == [ci.CPU_JOBS]
    assert ci.ci_files({}, CHANGED, on_cpu=True) == {}


def test_a_description_follows_the_template_of_the_base() -> None:
    template = Template.read(TEMPLATE)
    assert template.headings == ("Purpose", "Test Plan", "Test Result")
    assert "- [x] AI assistance was used" in template.checklist
    later = Template.read("## Overview\n\n## Claims\n\n## Validation\n\n## Details\n")
    assert later.headings == ("Overview", "Claims", "Validation", "Details")
    assert Template.read("## Weather\n") == Template()
