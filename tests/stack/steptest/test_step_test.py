# SPDX-License-Identifier: Apache-2.0
"""A step's test in real runs of pytest, on two wheels of a small release."""

import os
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_stack import PROVES, TinyStack

from stack.core.errors import SeriesError
from stack.core.files import closure
from stack.core.process import Runner
from stack.core.project import Project
from stack.steptest import step_test
from stack.steptest.material import ENTRY_POINTS, Support, material_of
from stack.steptest.server import warm_server
from stack.steptest.step_test import StepTest

KERNELS = "2.11.0"
IN_BODY = (
    "def test_a():\n    from vllm.value import VALUE, {name}\n    assert VALUE == 2\n"
)


def run(tiny: TinyStack, tmp_path: Path, source: str, failure="assert 1 == 2"):
    """Test the step of v1.0 with `source` as its module."""
    root = tmp_path / "project"
    for name in ("standins/emulated_xpu", "kernels"):
        (root / name).mkdir(parents=True)
        for path in (tiny.project.root / name).iterdir():
            (root / name / path.name).write_bytes(path.read_bytes())
    for name in (
        "standins/emulated_xpu/README.md",
        "standins/emulated_xpu/data.txt",
        "kernels/spare.py",
    ):
        (root / name).write_text("")
    (root / "tests/steps").mkdir(parents=True)
    (root / "tests/steps/test_value.py").write_text(source)
    step = tiny.series().steps[0].step
    step = replace(step, trailers=replace(step.trailers, fails_before=failure))
    runner = Runner()
    before, after = tiny.builds(runner)
    material = material_of(Support.of(Project(root)), step)
    test = StepTest(step, material, before, after, KERNELS)
    material.support.lay_out(tmp_path / "support")
    with closing(warm_server(runner)) as server:
        return test.run(server, tiny.cache, tmp_path / "support")


def test_the_runs_know_the_plugin_that_is_installed():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["vllm.platform_plugins"]
    lines = ENTRY_POINTS.splitlines()
    assert [f"{name} = {place}" for name, place in points.items()] == lines[1:2]


def test_red_before_and_green_after_proves_the_step(tiny, tmp_path):
    done = run(tiny, tmp_path, PROVES)
    assert (done.status, done.detail) == ("passed", ())
    assert done.summary == "1 tests, 1 fail before"


def test_red_before_only_by_import_error_proves_nothing(tiny, tmp_path):
    source = PROVES.replace("import value", "import value, nowhere")
    done = run(tiny, tmp_path / "a", source)
    assert any("only because the module cannot be" in text for text in done.detail)
    source = IN_BODY.format(name="nowhere")
    done = run(tiny, tmp_path / "b", source, "cannot import name")
    assert any("only by ImportError" in text for text in done.detail)


def test_green_before_proves_nothing(tiny, tmp_path):
    done = run(tiny, tmp_path, "def test_nothing():\n    import vllm.value\n")
    assert any("passes before the step" in text for text in done.detail)


def test_fails_before_cannot_match_the_source_of_the_test(tiny, tmp_path):
    source = PROVES.replace("== 2", "== 2, 'other'  # the words of the trailer")
    done = run(tiny, tmp_path, source, "the words of the trailer")
    assert any("no failure before the step matches" in text for text in done.detail)


def test_unchanged_must_pass_on_both_trees(tiny, tmp_path):
    marked = "import pytest\n\n" + PROVES + "\n\n@pytest.mark.unchanged\n{}"
    good = "def test_old():\n    assert value.OLD == 1\n"
    assert run(tiny, tmp_path / "good", marked.format(good)).detail == ()
    bad = "def test_old():\n    assert value.VALUE == 2\n"
    done = run(tiny, tmp_path / "bad", marked.format(bad))
    assert any("marked unchanged but fails" in text for text in done.detail)


def test_what_needs_no_xpu_must_pass_on_a_cpu_too(tiny, tmp_path):
    marked = (
        "import os\n\nimport pytest\n\n" + PROVES + "\n\n@pytest.mark.unchanged\n"
        "@pytest.mark.any_platform\ndef test_old():\n    assert {}\n"
    )
    done = run(tiny, tmp_path / "good", marked.format("value.OLD == 1"))
    assert done.detail == ()
    assert done.summary == "2 tests, 1 fail before, 1 on a CPU too"
    emulated = "os.environ['VLLM_PLUGINS'] == 'emulated_xpu'"
    done = run(tiny, tmp_path / "bad", marked.format(emulated))
    problems = done.detail[: done.detail.index("")]
    assert [text.partition(":")[0] for text in problems] == [
        "test_old fails on a CPU before the step",
        "test_old fails on a CPU after the step",
    ]
    assert any("test_old" in line for line in done.detail[len(problems) :])


def test_a_module_that_needs_an_xpu_runs_nowhere_else(tiny, tmp_path):
    look = "import os\n\nassert os.environ['VLLM_PLUGINS'] == 'emulated_xpu'\n"
    assert run(tiny, tmp_path, look + PROVES).detail == ()


def test_a_skip_is_reported_with_its_reason_and_fails(tiny, tmp_path):
    skip = "import pytest\n\n{}\n\n{}def test_gpu():\n    pytest.skip('no device')\n"
    done = run(tiny, tmp_path / "a", skip.format(PROVES, ""))
    assert any("is skipped after the step: no device" in t for t in done.detail)
    done = run(tiny, tmp_path / "b", skip.format(PROVES, "@pytest.mark.may_skip\n"))
    assert done.detail == ()
    assert done.notes == ("skipped: test_gpu: no device",)


def test_a_crash_and_a_hang_are_failures(tiny, tmp_path, monkeypatch):
    done = run(tiny, tmp_path / "a", "import os\n\nos._exit(7)\n")
    assert any("exit status 7" in text for text in done.detail)
    done = run(tiny, tmp_path / "c", "import ctypes\n\nctypes.string_at(0)\n")
    assert any("killed by signal 11 (SIGSEGV)" in text for text in done.detail)
    monkeypatch.setattr(step_test, "LIMIT", 2.0)
    monkeypatch.setattr(step_test, "TARGET", 1.0)
    hang = PROVES.replace("    assert", "    import time; time.sleep(60)\n    assert")
    done = run(tiny, tmp_path / "b", hang)
    assert any("killed after 2 s" in text for text in done.detail)
    assert len([note for note in done.notes if "at most" in note]) == 2


def test_a_run_that_ends_itself_early_proves_nothing(tiny, tmp_path):
    """What it ran until then was green."""
    source = PROVES + "\n\ndef test_end():\n    import pytest; pytest.exit('enough')\n"
    done = run(tiny, tmp_path, source)
    assert any("after the step: it ended with exit" in text for text in done.detail)


def test_compilation_is_off_where_a_module_does_not_ask_for_it(tiny, tmp_path):
    look = "    import os\n    assert ('TORCHDYNAMO_DISABLE' in os.environ) is {}\n"
    assert run(tiny, tmp_path / "a", PROVES + look.format(True)).detail == ()
    marked = "import pytest\n\npytestmark = pytest.mark.compiled\n" + PROVES
    assert run(tiny, tmp_path / "b", marked + look.format(False)).detail == ()


READS_DATA = (
    PROVES
    + """
    from pathlib import Path
    from standins.emulated_xpu import pytest_plugin
    Path(pytest_plugin.__file__).with_name("data.txt").read_text()
"""
)


def test_a_result_counts_while_what_its_run_read_is_the_same(tiny, tmp_path):
    done = run(tiny, tmp_path, READS_DATA)
    assert done.status == "passed", done.detail
    expected = {
        "standins/emulated_xpu/pytest_plugin.py",
        "standins/emulated_xpu/data.txt",
    }
    assert expected <= done.reads.keys()
    project = Project(tmp_path / "project")
    for name, counts in (
        ("standins/emulated_xpu/README.md", True),
        ("kernels/spare.py", True),
        ("standins/emulated_xpu/data.txt", False),
        ("standins/emulated_xpu/pytest_plugin.py", False),
    ):
        before = (project.root / name).read_bytes()
        (project.root / name).write_bytes(before + b"# A remark.\n")
        assert Support.of(project).has(done.reads) == counts, name
        (project.root / name).write_bytes(before)
    assert Support.of(project).has(done.reads)


def test_a_run_that_starts_a_process_may_have_read_anything(tiny, tmp_path):
    source = PROVES + "    import subprocess\n    subprocess.run(['true'])\n"
    done = run(tiny, tmp_path, source)
    assert done.status == "passed", done.detail
    assert "kernels/spare.py" in done.reads


def test_the_key_depends_on_the_pinned_kernels(tiny):
    before, after = tiny.builds(Runner())
    step = tiny.series().steps[0].step
    material = material_of(Support.of(tiny.project), step)
    key, other_key, same_key = (
        StepTest(step, material, before, after, kernels).key
        for kernels in ("2.11.0", "2.11.1", "2.11.0")
    )
    assert key == same_key != other_key


def test_a_module_is_read_once_and_again_before_it_runs(tiny, tmp_path):
    tiny = tiny.copy(tmp_path)
    step = tiny.series().steps[0].step
    before, after = tiny.builds(Runner())
    support = Support.of(tiny.project)
    test = StepTest(step, material_of(support, step), before, after, KERNELS)
    key = test.key
    (tiny.project.root / step.trailers.test).write_text("edited = True\n")
    assert material_of(support, step) is test.material
    assert (test.key, test.now().key != key) == (key, True)


def test_the_run_sees_the_wheel_and_nothing_of_the_caller(tiny, tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(os.environ, "VLLM_TARGET_DEVICE", "cuda")
    source = (
        "import os\n" + PROVES + "    assert 'VLLM_TARGET_DEVICE' not in os.environ\n"
    )
    assert run(tiny, tmp_path, source).detail == ()


def test_the_closure_is_what_the_module_imports_beside_it(tmp_path):
    files = {
        "test_a.py": "import torch\nfrom reference_a import x\n",
        "reference_a.py": "from shared import y\nfrom helpers import batch\n",
        "shared.py": "import reference_a\n",
        "helpers/__init__.py": "",
        "helpers/batch.py": "from . import layer\nfrom .formats import FP8\n",
        "helpers/layer.py": "from helpers.parts.norms.rms import norm\n",
        "helpers/formats.py": "",
        "helpers/parts/__init__.py": "",
        "helpers/parts/norms/__init__.py": "",
        "helpers/parts/norms/rms.py": "from ... import batch\n",
        "conftest.py": "",
    }
    others = ["test_b.py", "reference_b.py", "helpers/layout.py", "helpers/parts/b.py"]
    for name, text in {**files, **dict.fromkeys(others, "")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    roots = [tmp_path / name for name in ("test_a.py", "conftest.py")]
    assert sorted(closure(roots, tmp_path)) == sorted(files)


def test_a_missing_module_is_named(tiny, tmp_path):
    step = tiny.series().steps[0].step
    with pytest.raises(SeriesError, match="does not exist") as caught:
        material_of(Support.of(Project(tmp_path)), step)
    assert caught.value.step == "raise-value"
