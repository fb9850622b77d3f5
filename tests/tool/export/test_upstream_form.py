# SPDX-License-Identifier: Apache-2.0
"""Upstream's form of kernels, tests, CI jobs and descriptions."""

from pathlib import Path

import pytest
import yaml
from test_export import JOBS, TEMPLATE

from xpustack.core.errors import SeriesError
from xpustack.core.process import Runner
from xpustack.export.pull_request import Template
from xpustack.export.upstream_form import TEST_HOME, kernel, package, tidy
from xpustack.export.upstream_trees import ci_job

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
    vllm = ["vllm/__init__.py", "vllm/triton_utils/__init__.py"]
    done = tidy(form, PYPROJECT, vllm, tmp_path, Runner(), release="v1.0")
    assert done[path].decode().splitlines()[:5] == [
        "import torch",
        "",
        "from vllm.triton_utils import tl, triton",
        "",
        "from ._launch import launch_options",
    ]


def test_a_file_that_ruff_would_rewrite_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SeriesError, match="ruff refuses"):
        tidy({"a.py": b"def (\n"}, PYPROJECT, [], tmp_path, Runner(), release="v1.0")


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


def test_the_tests_get_a_job_of_their_own() -> None:
    old, new = yaml.safe_load(JOBS), yaml.safe_load(ci_job(JOBS) or "")
    assert new["steps"][0] == old["steps"][0] and len(new["steps"]) == 2
    job = new["steps"][1]
    assert job["label"] == ":intel: (BMG) DeepSeek-V4"
    assert job["key"] == "deepseek-v4-xpu"
    assert TEST_HOME in job["source_file_dependencies"]
    assert job["commands"] == [
        "bash run.sh 'cd tests && pytest -v -s models/deepseek_v4/xpu'"
    ]
    assert ci_job("steps: []\n") is None


def test_a_description_follows_the_template_of_the_base() -> None:
    template = Template.read(TEMPLATE)
    assert template.headings == ("Purpose", "Test Plan", "Test Result")
    assert "- [x] AI assistance was used" in template.checklist
    later = Template.read("## Overview\n\n## Claims\n\n## Validation\n\n## Details\n")
    assert later.headings == ("Overview", "Claims", "Validation", "Details")
    assert Template.read("## Weather\n") == Template()
