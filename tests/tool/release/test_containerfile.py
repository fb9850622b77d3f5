# SPDX-License-Identifier: Apache-2.0
"""Both Containerfiles: parsed, linted, and in step with what a build yields."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from shipped_stack import ShippedStack

from xpustack.core.project import Project
from xpustack.release.runtime import VIRTUAL_ENVIRONMENT

ARGUMENTS = {
    "deploy/Containerfile": "container.args",
    "deploy/official.Containerfile": "official.args",
}


@pytest.fixture(params=ARGUMENTS)
def path(request: pytest.FixtureRequest, real_project: Project) -> Path:
    return real_project.root / request.param


@pytest.fixture
def lines(path: Path) -> list[dict[str, str]]:
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    return [line for line in parser.structure if line["instruction"] != "COMMENT"]


def of(lines: list[dict[str, str]], instruction: str) -> list[str]:
    return [line["value"] for line in lines if line["instruction"] == instruction]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    return subprocess.run(
        [str(program), "--no-color", str(path)], capture_output=True, text=True
    )


def test_hadolint_has_nothing_to_say(path: Path):
    done = hadolint(path)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_does_judge(path: Path, tmp_path: Path):
    bad = tmp_path / "Containerfile"
    bad.write_text(path.read_text() + "RUN cd /tmp\n")
    done = hadolint(bad)
    assert (done.returncode, "DL3003" in done.stdout) == (1, True), done.stdout


def test_its_arguments_are_those_that_a_build_yields(
    path: Path, lines: list[dict[str, str]], shipped: ShippedStack
):
    name = ARGUMENTS[f"deploy/{path.name}"]
    text = (shipped.root / "dist/v1.0" / name).read_text()
    given = {line.partition("=")[0] for line in text.splitlines()}
    asked = {value.partition("=")[0] for value in of(lines, "ARG")}
    assert asked == given
    assert not any(" " in line for line in text.splitlines())


def test_it_copies_what_lies_beside_a_wheel(
    lines: list[dict[str, str]], shipped: ShippedStack
):
    [copied] = of(lines, "COPY")
    *names, wheel, place = copied.split()
    assert (wheel, place) == ("${WHEEL}", "./")
    folder = shipped.root / "dist/v1.0"
    assert {"constraints.txt", "runtime.txt"} <= set(names)
    assert set(names) <= {path.name for path in folder.iterdir()}


def test_the_image_comes_from_the_base_and_no_host_is_named(
    path: Path, lines: list[dict[str, str]]
):
    [image] = of(lines, "FROM")
    assert image in ("${BASE_IMAGE}", "${OFFICIAL_IMAGE}")
    assert not re.search(r"https?://|\.(com|org|io|ai)\b", path.read_text())


def test_the_server_is_what_starts(path: Path, lines: list[dict[str, str]]):
    assert json.loads(of(lines, "ENTRYPOINT")[0]) == ["vllm", "serve"]
    # The official image keeps upstream's user.
    users = of(lines, "USER")
    assert users == (["10001"] if path.name == "Containerfile" else [])


def test_both_use_the_folder_of_the_environment_that_the_base_uses(
    lines: list[dict[str, str]],
):
    assert any(f"{VIRTUAL_ENVIRONMENT}" in script for script in of(lines, "RUN"))


def test_the_official_image_keeps_everything_but_vllm(real_project: Project):
    text = (real_project.root / "deploy/official.Containerfile").read_text()
    [line] = re.findall(r"pip install (.*(?:\\\n.*)?)", text)
    assert "--no-deps" in line and "apt-get" not in text


def test_every_script_is_one_that_bash_understands(lines: list[dict[str, str]]):
    bash = shutil.which("bash")
    assert bash is not None
    for script in of(lines, "RUN"):
        done = subprocess.run(
            [bash, "-n", "-c", script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        # A step between semicolons that fails must stop the build.
        assert ";" not in script or "set -o errexit;" in script or "-c" in script


def test_its_last_check_refuses_another_version(
    lines: list[dict[str, str]], tmp_path: Path
):
    """The very script, run here against pytest's own version."""
    [script] = [script for script in of(lines, "RUN") if "importlib" in script]
    code = re.search(r'python3 -c "(.*)"', script, re.DOTALL)
    assert code is not None

    def run(
        version: str, runtime: str = "", removed: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "constraints.txt").write_text(
            f"# a comment: torch==0\npytest=={version}\n"
        )
        (tmp_path / "runtime.txt").write_text(f"# nothing==0\n{runtime}\n")
        return subprocess.run(
            [sys.executable, "-c", code[1]],
            cwd=tmp_path,
            env={**os.environ, "REMOVED": removed},
            capture_output=True,
            text=True,
        )

    assert run(pytest.__version__).returncode == 0
    assert (
        run(pytest.__version__, f"rich=={version_of('rich')}", "oneccl").returncode == 0
    )
    done = run("0.1")
    assert (done.returncode, "not 0.1" in done.stderr) == (1, True)
    assert run(pytest.__version__, "rich==0.1").returncode == 1
    if "REMOVED" in code[1]:
        assert "still there" in run(pytest.__version__, removed="a,rich").stderr
